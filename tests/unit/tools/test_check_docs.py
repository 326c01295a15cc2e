"""Tests of the rules for Markdown pages in English and Chinese."""

from pathlib import Path

import pytest

from check_docs import find_breaks_in_chinese_text
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
