"""The snippets of docs/own-apps.md are parts of the example app, which other tests run."""

import re

import pytest

from .pages import ROOT, _tokens

PAGE = ROOT / "docs" / "own-apps.md"
EXAMPLE = ROOT / "examples" / "own-app"
SNIPPETS = [token.content for token in _tokens(PAGE) if token.type == "fence"]


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_each_snippet_is_a_part_of_the_example(snippet):
    head, _, code = snippet.partition("\n")
    file = re.fullmatch(r"# ([\w./]+)", head)
    assert file, "its first line must name a file of the example"
    assert code in (EXAMPLE / file[1]).read_text(encoding="utf-8")
