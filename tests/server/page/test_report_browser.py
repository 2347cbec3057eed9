"""The report in a real browser: Chromium without a screen, from a file."""

import pytest

from flwr_distill.server.page.comparison_page import comparison_page
from flwr_distill.server.page.run_files import read_run
from tests.browsers import chromium, needs_browser, scrolls_sideways, set_width

pytestmark = [pytest.mark.slow, needs_browser]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("chromium")) as driver:
        yield driver


@pytest.fixture
def pages(finished_run):
    """A run of many rounds, and a comparison."""
    accuracies = [0.1 + 0.02 * i for i in range(40)]
    folders = [
        finished_run("7081524913348765001", accuracies),
        finished_run("7081524913348765002", strategy="hfldd"),
    ]
    comparison = folders[0].parent / "comparison.html"
    files = [read_run(folder) for folder in folders]
    comparison.write_text(comparison_page(files, comparison.parent))
    return [folders[0] / "report.html", comparison]


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_render_without_an_error_and_never_scroll_sideways(browser, pages, width, scheme):
    set_width(browser, width)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    for page in pages:
        browser.get(page.as_uri())
        run = browser.execute_script
        assert run("return document.documentElement.clientWidth") >= width - 20
        assert not scrolls_sideways(browser)
        drawn = run(
            "return [...document.querySelectorAll('figure > svg')]"
            ".map(svg => svg.getBoundingClientRect().height)"
        )
        assert len(drawn) >= 3
        assert all(height > 50 for height in drawn)
        paper = run("return getComputedStyle(document.body).backgroundColor")
        darkness = sum(int(part) for part in paper.strip("rgb()").split(","))
        assert (darkness < 200) == (scheme == "dark")
        assert run("return performance.getEntriesByType('resource').length") == 0
        assert browser.get_log("browser") == []


def test_the_browser_would_tell_of_an_error(browser, tmp_path):
    page = tmp_path / "broken.html"
    page.write_text("<script>throw new Error('seen')</script>")
    browser.get(page.as_uri())
    assert "seen" in browser.get_log("browser")[0]["message"]
