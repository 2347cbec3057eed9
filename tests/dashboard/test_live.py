"""The dashboard of a live federation in a real browser: what happens is on the page at once."""

import contextlib
import os
import re
import signal
import time

import httpx
import pytest
from safetensors.numpy import load

from flwr_distill.fleet.local_federation import LocalFederation, free_ports
from flwr_distill.node.processes import start_bound, stop
from tests.browsers import chromium, needs_browser, scrolls_sideways, set_width
from tests.environments import PROGRAM
from tests.waiting import wait_until

from .served import served

pytestmark = [pytest.mark.slow, needs_browser, pytest.mark.timeout(300)]
SETTINGS = 'strategy="fedavg" num-rounds={rounds} model="mlp" train.local-epochs=1'


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    folder = tmp_path_factory.mktemp("federation")
    with LocalFederation(3, folder / "state", cwd=folder) as running:
        yield running


@pytest.fixture(scope="module")
def address(federation, tmp_path_factory):
    (port,) = free_ports(1)
    options = ("--port", port, "--allow-actions", "--state-dir", federation.state_dir)
    with served(*options, cwd=tmp_path_factory.mktemp("dashboard")) as address:
        yield address


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("chromium")) as driver:
        yield driver


@pytest.fixture(autouse=True)
def no_errors_in_the_browser(request):
    yield
    assert request.getfixturevalue("browser").get_log("browser") == []


def text_of(browser, part):
    return browser.execute_script(
        f"return document.querySelector('[data-part={part}]')?.innerText ?? ''"
    )


def waited(browser, part, *words, seconds=60.0):
    """Text of a part of the page once it has all words; the page is not loaded again."""

    def has_all():
        text = text_of(browser, part)
        return text if all(re.search(word, text) for word in words) else None

    return wait_until(has_all, seconds, lambda: f"no {words} in: {text_of(browser, part)}")


def rounds_drawn(browser):
    return browser.execute_script(
        "return document.querySelectorAll('[data-part=live] .curve.main circle').length"
    )


def submitted(browser, address, settings):
    """Submit a run by keyboard alone: from the page's first link through the form."""
    from selenium.webdriver.common.keys import Keys

    browser.get(address)
    focus = browser.switch_to
    for _ in range(30):
        focus.active_element.send_keys(Keys.TAB)
        if focus.active_element.text == "Submit a run":
            break
    focus.active_element.send_keys(Keys.ENTER)
    while focus.active_element.get_attribute("id") != "settings":
        focus.active_element.send_keys(Keys.TAB)
    before = browser.current_url
    focus.active_element.send_keys(settings, Keys.TAB, Keys.ENTER)
    return answered(browser, before)


def acted(browser, button):
    """What the page says after a button."""
    before = browser.current_url
    browser.execute_script("document.getElementById(arguments[0]).click()", button)
    return answered(browser, before)


def answered(browser, before):
    """What the next page says."""
    wait_until(lambda: browser.current_url != before)
    return browser.execute_script("return document.querySelector('.message')?.innerText ?? ''")


def test_a_run_from_the_form_to_its_export(federation, address, browser):
    said = submitted(browser, address, SETTINGS.format(rounds=400))
    run_id = re.search(r"Run (\d+) has started", said)[1]
    waited(browser, "live", "fedavg on digits", r"Round\s+[1-9]", "Time left")
    drawn = rounds_drawn(browser)
    waited(browser, "nodes", "3 of 3 online", "100 to 1,000 samples", "cpu", r"\d+\.\d+\.\d+")
    wait_until(lambda: rounds_drawn(browser) > drawn)
    browser.get(f"{address}/runs/{run_id}")
    waited(browser, "log", r"round +\d+/400")
    assert "being stopped" in acted(browser, "stop")
    waited(browser, "run", "stopped")
    assert "is exported" in acted(browser, "export")
    links = browser.find_elements("css selector", "a[href*='/export/']")
    (model,) = (a.get_attribute("href") for a in links if a.text.endswith(".safetensors"))
    assert len(load(httpx.get(model).content)) > 2
    assert not (federation.state_dir.parent / "runs" / run_id / "export").exists()
    resumed = re.search(r"Run (\d+) has started", acted(browser, "resume"))[1]
    browser.get(f"{address}/runs/{resumed}")
    waited(browser, "run", "running", r"Round\s+[1-9]\d* of 400")
    acted(browser, "stop")
    waited(browser, "run", "stopped")


def test_an_awaited_node_is_named_and_one_that_is_down_is_an_alarm(federation, address, browser):
    said = submitted(browser, address, SETTINGS.format(rounds=1000))
    run_id = re.search(r"Run (\d+) has started", said)[1]
    waited(browser, "live", r"Round\s+[1-9]")
    node = federation.nodes[2]
    parts = node.status
    os.kill(parts["executor"], signal.SIGSTOP)
    try:
        waited(browser, "live", r"Awaited\s+1 of 3: node-2")
        waited(browser, "nodes", "node-2[^\n]*\n?.*round")
        node.kill()  # while it has a message, which is lost
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(parts["executor"], signal.SIGCONT)
    waited(browser, "alarms", "node-2 is not running")
    node.start()
    federation.wait_for_nodes()
    waited(browser, "alarms", "Nothing needs attention", seconds=120)
    browser.get(f"{address}/runs/{run_id}")
    waited(browser, "problems", "node-2")
    acted(browser, "stop")
    waited(browser, "run", "stopped")


def test_runs_that_wait_are_in_the_queue_with_the_reason(federation, address, browser):
    here = ("--state-dir", str(federation.state_dir))
    log = federation.state_dir / "queue.log"
    queue = start_bound([*PROGRAM, "queue", "serve", *here], log=log, env=federation.env)
    try:
        wait_until(lambda: "is served" in log.read_text())
        assert "Run 1 is in the queue" in submitted(browser, address, SETTINGS.format(rounds=3))
        assert "Run 2" in submitted(browser, address, SETTINGS.format(rounds=3))
        waited(browser, "queue", "waiting", "running|starting")
        waited(browser, "queue", "completed[^*]*completed")
    finally:
        stop([queue])
    picks = browser.find_elements("css selector", "input[type=checkbox]")
    for pick in picks[:2]:
        pick.click()
    chosen = [pick.get_attribute("id") for pick in picks[:2]]
    time.sleep(4)  # the page was replaced meanwhile
    checked = browser.find_elements("css selector", "input:checked")
    assert [pick.get_attribute("id") for pick in checked] == chosen
    before = browser.current_url
    browser.find_element("id", "compare").click()
    answered(browser, before)
    assert "compared" in browser.page_source
    browser.find_element("link text", "Report of fedavg " + "…" + chosen[0][-5:]).click()
    assert "fedavg on digits" in browser.title


@pytest.mark.parametrize("width", [390, 1280])
def test_pages_fit_the_screen(federation, address, browser, width):
    set_width(browser, width)
    run = httpx.get(address).text.partition('href="/runs/')[2].partition('"')[0]
    for page in ("/", f"/runs/{run}", "/submit", "/outboxes/node-0"):
        browser.get(address + page)
        assert not scrolls_sideways(browser), page
