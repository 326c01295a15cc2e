"""Tests that the Chinese pages are complete and agree with their English pages."""

import re
from pathlib import Path

import pytest

from finetune_api.v1alpha1.reasons import Reason
from translations import BLOCK, links_to

ROOT = Path(__file__).parents[3]
PAGES = (ROOT / "README.zh-CN.md", *sorted((ROOT / "docs" / "zh").rglob("*.md")))
ENGLISH_FAILURES = ROOT / "docs" / "reference" / "failures.md"
CHINESE_FAILURES = ROOT / "docs" / "zh" / "reference" / "failures.md"
MARKS = {  # sentences of the English table, and of the Chinese one
    "*Changed.*": "*会调整*",
    "Later attempts avoid that Kubernetes node.": "之后的 attempt 会避开这个 Kubernetes 节点",
    "After two failures in a day on one Kubernetes node, later attempts avoid it.": "两次后，之后的 attempt 会避开它",
    "Also recognised in error text.": "也由报错文本识别",
}


def read_reasons(page: Path) -> dict[str, dict[str, str]]:
    """Return the meaning of each reason in a page about failures, by fault."""
    sections = re.split(r"^## .*fault: (\w+).*$", page.read_text(), flags=re.MULTILINE)[1:]
    return {
        fault: dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", text, re.MULTILINE))
        for fault, text in zip(sections[::2], sections[1::2], strict=True)
    }


def test_chinese_pages_are_found() -> None:
    assert {str(page.relative_to(ROOT)) for page in PAGES} == {
        *("README.zh-CN.md", "docs/zh/getting-started.md", "docs/zh/how-to/batch-size.md"),
        *("docs/zh/how-to/data-parallel.md", "docs/zh/how-to/dpo.md", "docs/zh/how-to/index.md"),
        *("docs/zh/how-to/multi-node.md", "docs/zh/index.md", "docs/zh/reference/failures.md"),
        *("docs/zh/user-guide/convert.md",),
    }
    assert sum(len(BLOCK.findall(page.read_text())) for page in PAGES) > 40


def test_readme_links_to_its_translation_in_its_first_lines() -> None:
    first_lines = "\n".join((ROOT / "README.md").read_text().splitlines()[:4])

    assert links_to(first_lines, ROOT / "README.zh-CN.md", folder=ROOT)


def test_chinese_page_of_failures_lists_the_reasons_of_each_fault_in_the_same_order() -> None:
    english, chinese = read_reasons(ENGLISH_FAILURES), read_reasons(CHINESE_FAILURES)

    assert list(english) == list(chinese)
    assert [list(reasons) for reasons in english.values()] == [list(reasons) for reasons in chinese.values()]
    assert {reason for reasons in chinese.values() for reason in reasons} == {
        str(reason) for reason in Reason if reason.fault is not None
    }


@pytest.mark.parametrize("mark", MARKS)
def test_chinese_page_of_failures_has_the_marks_of_each_reason(mark: str) -> None:
    english, chinese = (
        {
            reason
            for reasons in read_reasons(page).values()
            for reason, meaning in reasons.items()
            if sentence in meaning
        }
        for page, sentence in ((ENGLISH_FAILURES, mark), (CHINESE_FAILURES, MARKS[mark]))
    )

    assert english
    assert english == chinese
