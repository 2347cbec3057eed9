"""The page on what leaves a node speaks of every strategy."""

from protocol.registry import built_in_methods

from .pages import ROOT


def test_every_strategy_has_a_row_in_the_page_on_what_leaves_a_node():
    page = (ROOT / "docs" / "what-leaves.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    missing = [name for name in built_in_methods() if not any(f"`{name}`" in row for row in rows)]
    assert missing == []
