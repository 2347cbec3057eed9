"""Sentences of the pages are short."""

import re

import pytest

from .pages import PAGES, ROOT, _tokens

MAX_WORDS = 25
GENERATED = {"asks.md", "settings.md"}
"""Their sentences stand in the code."""
WRITTEN = [
    page
    for page in PAGES
    if "archive" not in page.parts and "examples" not in page.parts and page.name not in GENERATED
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


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_of_a_page_are_short(page):
    assert [text for text in sentences(page) if len(text.split()) > MAX_WORDS] == []
