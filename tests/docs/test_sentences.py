"""Sentences of the pages are short."""

import re

import pytest

from .pages import ROOT, _tokens

MOST = 25
NAMES = (
    *("data", "design", "distil", "glossary", "gpu", "index", "own-apps", "papers", "plugins"),
    *("protection", "recovery", "results", "runs", "start", "tutorial", "tutorial-tables"),
)
SHORT = [
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in NAMES),
    *sorted((ROOT / "docs" / "methods").glob("*.md")),
]
_END = re.compile(r"(?<=[.!?:])[)*\"]*\s+|\n\n")


def sentences(page):
    """Sentences of a page's text, without tables; code in the text counts as a word."""
    cell = False
    for token in _tokens(page):
        cell = cell or token.type in ("td_open", "th_open")
        cell = cell and token.type not in ("td_close", "th_close")
        if token.type == "inline" and not cell:
            text = "".join(
                {"code_inline": "CODE", "softbreak": " ", "image": ""}.get(c.type, c.content)
                for c in token.children
            )
            yield from _END.split(text)


@pytest.mark.parametrize("page", SHORT, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_sentence_of_a_page_is_longer_than_the_most(page):
    long = [text for text in sentences(page) if len(text.split()) > MOST]
    assert long == []
