"""Chromium without a screen."""

import contextlib
import shutil

import pytest

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
needs_browser = pytest.mark.skipif(
    not (CHROMIUM and DRIVER),
    reason="NO BROWSER: install chromium and chromedriver (Debian: chromium chromium-driver)",
)


@contextlib.contextmanager
def chromium(folder):
    """A browser with its profile in a folder; its log is kept for `get_log`."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={folder}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with webdriver.Chrome(options=options, service=Service(DRIVER)) as driver:
        yield driver


def set_width(browser, width):
    """Show pages as on a screen of so many pixels: a phone's below 500."""
    device = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", device)


def scrolls_sideways(browser):
    """Whether the page is wider than the screen."""
    root = "document.documentElement"
    return browser.execute_script(f"return {root}.scrollWidth > {root}.clientWidth")
