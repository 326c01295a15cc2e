"""Tests of the rules for Markdown pages in English and Chinese."""

from pathlib import Path

import pytest

from check_docs import find_breaks_in_chinese_text, find_missing_tests, find_unproven_statements
from environment import ROOT as REPOSITORY
from translations import find_translation_problems

ENGLISH = "# Run a job\n\n```bash\nkubectl apply -f job.yaml   # start it\n```\n"
CHINESE = "# 运行任务\n\n[English](../run.md)\n\n```bash\nkubectl apply -f job.yaml   # 启动\n```\n"


@pytest.fixture
def docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder docs/ of an empty repository that contains a folder for Chinese pages."""
    monkeypatch.setattr("check_docs.ROOT", tmp_path)
    (tmp_path / "docs" / "zh").mkdir(parents=True)
    return tmp_path / "docs"


def write_page(page: Path, *lines: str) -> Path:
    page.write_text("\n".join(lines) + "\n")
    return page


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("每张", "卡", id="two Chinese characters"),
        pytest.param("两张卡，", "GPU", id="after a full-width comma"),
        pytest.param("GPU", "（两张）", id="before a full-width parenthesis"),
        pytest.param("参见", "[显存](memory.md)", id="before a link"),
        pytest.param("**显存", "不足**", id="in bold text"),
        pytest.param("- 每张", "  卡", id="in a list item"),
    ],
)
def test_line_break_where_chinese_text_has_no_space_is_reported(docs: Path, before: str, after: str) -> None:
    page = write_page(docs / "page.md", "# 标题", "", before, after)

    (problem,) = find_breaks_in_chinese_text(page)

    assert problem.startswith("docs/page.md:3: line break between")


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        pytest.param(
            "job.yaml ",
            "jobs.yaml ",
            "docs/zh/run.md:5: code block has the line 'kubectl apply -f jobs.yaml   #' instead of"
            " 'kubectl apply -f job.yaml   #' of docs/run.md:3",
            id="other command",
        ),
        pytest.param(
            "# 启动\n",
            "# 启动\nkubectl get ftj\n",
            "docs/zh/run.md:5: code block has the line 'kubectl get ftj' instead of None of docs/run.md:3",
            id="one more line",
        ),
        pytest.param("../run.md", "../ran.md", "docs/zh/run.md: no link to its English page docs/run.md", id="no link"),
    ],
)
def test_difference_between_translated_pages_is_reported(docs: Path, old: str, new: str, problem: str) -> None:
    assert old in CHINESE
    (docs / "run.md").write_text(ENGLISH)
    (docs / "zh" / "run.md").write_text(CHINESE.replace(old, new))

    assert list(find_translation_problems(docs / "zh" / "run.md", root=docs.parent)) == [problem]


def test_chinese_page_needs_an_english_page(docs: Path) -> None:
    (docs / "zh" / "run.md").write_text(CHINESE)

    assert list(find_translation_problems(docs / "zh" / "run.md", root=docs.parent)) == [
        "docs/zh/run.md: no English page docs/run.md"
    ]


STATEMENTS = (
    "| statement | test |",
    "| --- | --- |",
    "| pods have no token | `test_statement_without_a_test_is_reported` |",
)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        pytest.param(
            "| a pod is isolated | its namespace |", "docs/page.md:4: no test for 'a pod is isolated';", id="none"
        ),
        pytest.param("| a `test_name` | |", "docs/page.md:4: no test for 'a `test_name`';", id="in another column"),
        pytest.param("| a | `test_gone` |", "docs/page.md: test_gone: no such test;", id="that does not exist"),
    ],
)
def test_statement_without_a_test_is_reported(
    docs: Path, monkeypatch: pytest.MonkeyPatch, row: str, problem: str
) -> None:
    monkeypatch.setattr("check_docs.list_tests", lambda: {"test_name", "test_statement_without_a_test_is_reported"})
    page = write_page(
        docs / "page.md", *STATEMENTS, row, "", "| actor | access |", "| --- | --- |", "| author | pods |"
    )

    (found,) = (*find_unproven_statements(page), *find_missing_tests(page))

    assert found.startswith(problem)


def test_every_role_of_the_threat_model_has_statements_with_tests() -> None:
    """`make check` reports a row without a test; this test reports a role or a table that was removed."""
    page = (REPOSITORY / "docs" / "operations" / "security.md").read_text()
    threats = page.partition("\n## Threat model\n")[2].partition("\n## ")[0]
    roles = {section.partition("\n")[0]: section for section in threats.split("\n### ")[1:]}

    assert list(roles) == ["Pod author", "Job author", "Administrator", "Stolen operator token"]
    for role, section in roles.items():
        assert "\n| cannot | because | test |\n" in section, role
        assert section.count("`test_") > 5, role
        for part in ("**Has**", "**Remains**", "**Values against it**"):
            assert part in section, f"{role}: {part}"
