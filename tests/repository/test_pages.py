"""Links between the pages, and from them to files, lead somewhere."""

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


def test_there_are_pages() -> None:
    assert ROOT / "README.md" in PAGES
    assert len(PAGES) > 15
