"""Links of the pages lead somewhere, and docs/index.md leads to every page."""

import itertools
import re

import pytest

from tests.environments import project_files

from .pages import PAGES, ROOT, _tokens

INDEX = ROOT / "docs" / "index.md"
MAX_LINES = {"README.md": 200, "docs/design.md": 250}
_OUTSIDE = re.compile(r"[a-z]+:")
_POINTER = re.compile(r"\bdocs/[\w/-]+\.md(?:#[\w-]+)?")
SOURCES = {".md", ".py", ".toml", ".yaml", ".yml", ".html"}


def targets(page):
    """Files and anchors of this project that a page links to, pictures included."""
    for token in _tokens(page):
        for child in token.children or ():
            target = child.attrs.get("href") or child.attrs.get("src")
            if target and not _OUTSIDE.match(target):
                path, _, anchor = target.partition("#")
                yield (page.parent / path).resolve() if path else page, anchor


def anchors(page):
    """Anchors of a page's headings, as GitHub makes them."""
    created = set()
    tokens = _tokens(page)
    for opening, heading in itertools.pairwise(tokens):
        if opening.type == "heading_open":
            text = "".join(child.content for child in heading.children)
            created.add(re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-"))
    return created


def is_there(file, anchor):
    return file.exists() and (not anchor or anchor in anchors(file))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_link_of_a_page_leads_to_a_file_and_a_heading(page):
    assert [link for link in targets(page) if not is_there(*link)] == []


def test_each_page_that_a_file_of_the_project_names_is_there():
    named = {
        pointer: file.relative_to(ROOT)
        for file in project_files()
        if file.suffix in SOURCES
        for pointer in _POINTER.findall(file.read_text(encoding="utf-8"))
    }
    assert len(named) > 20
    missing = []
    for pointer, file in named.items():
        path, _, anchor = pointer.partition("#")
        if not is_there(ROOT / path, anchor):
            missing.append(f"{file}: {pointer}")
    assert missing == []


def test_the_index_leads_to_every_page_directly_or_through_one_that_it_links():
    direct = {file for file, _ in targets(INDEX)}
    pages = [file for file in direct if file.suffix == ".md" and file.is_relative_to(INDEX.parent)]
    linked = {file for page in pages for file, _ in targets(page)}
    assert set((ROOT / "docs").rglob("*.md")) <= {INDEX, *direct, *linked}


def test_each_file_that_the_architecture_names_exists_in_two_lists_of_ten_stops():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    files = set(re.findall(r"`([\w/]+/\w+\.py)`", text))
    assert len(files) > 30
    assert [name for name in sorted(files) if not (ROOT / name).exists()] == []
    for section in re.findall(r"^## Follow one .*?(?=^## )", text, re.M | re.S):
        assert len(re.findall(r"^\d+\. ", section, re.M)) <= 10


@pytest.mark.parametrize(("name", "most"), MAX_LINES.items())
def test_a_page_stays_short(name, most):
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= most
