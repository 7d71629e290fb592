"""Links between the pages, and from them to files, lead somewhere; and pages stay short enough to be read."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("papers/**/*.md")])
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(#[^)\s]*)?\)")


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for file, anchor in LINK.findall(page.read_text()):
        target = page.parent / file if file else page
        assert target.exists(), f"{file} is not there"
        if anchor:
            assert anchor[1:] in _anchors(target), f"{file}{anchor} is not there"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_line_is_a_comment_on_the_site(page: Path) -> None:
    """A line that begins with % is one, and the site leaves it out."""
    assert not re.findall(r"^ *%.*$", page.read_text(), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_wrap(page: Path) -> None:
    """Tables, code and the targets of links cannot."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    lines = [re.sub(r"`.*?`|\]\(.*?\)", "", line) for line in text.splitlines() if not line.startswith("|")]
    assert not [line for line in lines if len(line) > 100]


def test_pages_are_short_enough_to_be_read() -> None:
    words = {page.relative_to(ROOT): len(page.read_text().split()) for page in PAGES}
    assert words[Path("README.md")] <= 450
    assert sum(count for page, count in words.items() if page.parts[0] == "papers") <= 20_000
    assert 20_000 < sum(words.values()) <= 60_000


def test_tests_that_a_page_names_are_there() -> None:
    files = [file.read_text() for file in (ROOT / "tests").rglob("test_*.py")]
    there = {name for text in files for name in re.findall(r"^def (test_\w+)\(", text, re.MULTILINE)}
    assert {name for page in PAGES for name in re.findall(r"`(test_\w+)`", page.read_text())} <= there
