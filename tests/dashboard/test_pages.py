"""The dashboard's pages, whatever folders it is given: links lead somewhere, texts are no tags."""

import re
import time
from urllib.parse import unquote, urljoin

import pytest
from starlette.testclient import TestClient

from flwr_distill.fleet.dashboard.access import Access
from flwr_distill.fleet.dashboard.app import Dashboard
from flwr_distill.fleet.dashboard.watch import Place, Watch
from flwr_distill.node.outbox import FOLDER, log_file

from .superlink import FakeControl
from .test_files import write


@pytest.fixture
def served(tmp_path):
    def serve(*node_dirs):
        runs = tmp_path / "runs"
        runs.mkdir(exist_ok=True)
        place = Place("here:9093", FakeControl, runs, tmp_path / "state", node_dirs=node_dirs)
        dashboard = Dashboard(place, Access(), ["testserver"], allow_actions=True)
        return TestClient(dashboard.app)

    return serve


def links(page):
    return re.findall(r'href="([^"]+)"', page)


def test_a_nodes_outbox_is_reached_and_left_by_links_whatever_its_folder_is_called(
    served, tmp_path
):
    folder = tmp_path / "ward #3 <b>?50%"
    folder.mkdir()
    with served(folder) as client:
        (link,) = [each for each in links(client.get("/").text) if "/outboxes/" in each]
        outbox = client.get(link)
        assert outbox.status_code == 200
        assert unquote(link).endswith(folder.name)
        assert "/#nodes" in links(outbox.text)


def test_a_comparison_leads_back(served, tmp_path):
    for name in ("5", "6"):
        settings = {"strategy": "fedavg", "dataset": "digits", "num-rounds": 1}
        write(tmp_path / "runs" / name, settings_json=settings, about_json={"nodes": {}})
    with served() as client:
        assert "/#runs" in links(client.get("/runs/compare?run=5&run=6").text)


@pytest.mark.parametrize("page", ["/submit", "/runs/404"])
def test_sections_are_reached_from_other_pages(served, page):
    with served() as client:
        first = client.get("/").text
        sections = [each for each in links(client.get(page).text) if "#" in each]
        targets = {urljoin(page, each) for each in sections if each != "#main"}
        assert targets
        assert all(t.startswith("/#") and f'id="{t[2:]}"' in first for t in targets)


def test_a_node_directory_of_any_kind_leaves_the_page_there(served, tmp_path, monkeypatch):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    with served(".", "..", tmp_path / (300 * "x")) as client:
        page = client.get("/").text
    assert f'href="/outboxes/{here.name}"' in page
    assert f'href="/outboxes/{tmp_path.name}"' in page


def test_an_outbox_that_cannot_be_read_is_said(served, tmp_path):
    log_file(tmp_path / "ward" / FOLDER).mkdir(parents=True)
    with served(tmp_path / "ward") as client:
        client.get("/")  # waits for the first read
        answer = client.get("/outboxes/ward")
    assert answer.status_code == 409
    assert "ward&#39;s outbox cannot be read" in answer.text


def test_the_zone_of_all_times_is_said(served, monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    try:
        with served() as client:
            assert "UTC+05:30" in client.get("/").text
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_federation_that_cannot_be_read_is_said_in_words(served, monkeypatch):
    monkeypatch.setattr(Watch, "read", lambda self: 1 / 0)
    with served() as client:
        page = client.get("/").text
    assert '<h2 id="alarms">' in page
    assert "&lt;" not in page


def test_folders_of_no_run_are_not_listed_as_runs(served, tmp_path):
    for other in ("data-check", "nodes"):  # of `data check` and `simulate --policy`
        (tmp_path / "runs" / other).mkdir(parents=True)
    write(tmp_path / "runs" / "5", journal_jsonl="")
    with served() as client:
        page = client.get("/").text
    assert 'href="/runs/5"' in page
    assert "data-check" not in page
    assert 'href="/runs/nodes"' not in page
