"""A fault in the midst of a run: server and site say in one line what it is and what repairs it.

Journal, status, report and exit code agree on how the run ended, and the next run starts.
"""

import html
import json
import re
import time

import pytest

from flwr_distill.server.page.run_files import read_run
from tests.faults import tables
from tests.faults.conftest import ROOT
from tests.faults.plays import SETTINGS, Play, WiredFederation
from tests.faults.run_causes import FAULTS

HEAD = (
    "| fault | seconds | the server says | seconds | the site says | exit code, state |\n"
    "|---|---|---|---|---|---|\n"
)
QUICK = {
    "the ServerApp cannot be imported",
    "the ServerApp is killed, as if out of memory",
    "a node's app is killed, as if out of memory",
}
"""What CI runs; the others are in `make test-faults-all`."""
STOPS_WITHIN = 40.0
"""Seconds in which a ServerApp that hangs learns from its heartbeats that its run is stopped."""
IDS = re.compile(r"\b[0-9a-f]{64}\b|\b\d{15,20}\b")
COLOURS = re.compile(r"\x1b\[[0-9;]*m")

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    with WiredFederation(tmp_path_factory.mktemp("federation")) as running:
        running.make_whole()
        yield running


@pytest.fixture(scope="module")
def apps():
    """Folders of apps by their modules: a bundle that nodes know starts sooner."""
    return {}


@pytest.fixture(scope="module")
def table():
    """Rows by fault."""
    rows = {}
    yield rows
    tables.write("causes in a run", HEAD, FAULTS, rows)


def in_one_line(words, text):
    """The first line with all words; None without one."""
    lines = (COLOURS.sub("", line) for line in text.splitlines())
    return next((line for line in lines if all(w.lower() in line.lower() for w in words)), None)


def said(wanted, play, within):
    """Seconds after the fault, and the line, by side, as soon as it is there."""
    found = {}
    while missing := wanted.keys() - found.keys():
        over = time.monotonic() - play.broken_at > within
        for side in missing:
            words, read = wanted[side]
            if line := in_one_line(words, text := read()):
                found[side] = max(0.0, time.monotonic() - play.broken_at), line
            else:
                assert not over, f"the {side} has no line with all of {words}:\n{text[-4000:]}"
        time.sleep(0.1)
    return found


def check_agreement(fault, play, code):
    """Journal, state and report are about the end that the exit code says; return the state."""
    folder = play.run_folder
    if folder is None:  # its ServerApp never began
        assert code == 1
        return "-"
    entries = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    texts = "\n".join(text for e in entries if (text := e.get("warning") or e.get("error")))
    assert not fault.journal or all(word in texts for word in fault.server[1:]), texts
    if not (folder / "settings.json").exists():  # too few nodes could take part
        assert code == 1
        assert "error" in entries[-1]
        return "failed"
    expected = fault.state or ("failed" if code else "done")
    deadline = time.monotonic() + STOPS_WITHIN
    while (state := read_run(folder).state) != expected and time.monotonic() < deadline:
        time.sleep(0.5)
    assert state == expected
    report = folder / "report.html"
    wanted = fault.report and state in ("done", "failed")
    assert report.exists() == wanted
    if wanted and fault.journal:
        shown = html.unescape(re.sub(r"<[^>]*>", "", report.read_text()))
        assert all(word in shown for word in fault.server), shown[:4000]
    return state


def row(name, found, play, code, state):
    cells = [name]
    for side in ("server", "site"):
        seconds, line = found.get(side, ("", ""))
        line = IDS.sub("...", line.replace(str(play.folder), "...")).replace("|", "/").strip()
        line = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "...", line)
        line = re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:9092", line)
        cells += [f"{seconds:.1f}" if line else "", re.sub(r"^[A-Z]+ *: +", "", line)]
    return f"| {' | '.join([*cells, f'{code}, {state}'])} |"


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.all_faults) for n in FAULTS]
)
def test_a_fault_in_a_run_is_named_with_its_remedy_and_the_next_run_starts(
    name, federation, apps, table, tmp_path
):
    fault = FAULTS[name]
    play = Play(federation, tmp_path, apps)
    logs = [node.log.stat().st_size for node in federation.nodes]

    def site():
        file = federation.nodes[play.victim].log
        return file.read_bytes()[logs[play.victim] :].decode()

    sides = {
        "server": (fault.server, play.log.read_text),
        "site": (fault.site, site),
    }
    steps = fault.cause(play)
    try:
        next(steps)
        found = said({s: w for s, w in sides.items() if w[0]}, play, fault.within)
        play.heal()
        code = play.process.wait(play.patience)
        assert fault.code in (None, code), play.log.read_text()[-4000:]
        state = check_agreement(fault, play, code)
    finally:
        next(steps, None)
        play.end()
    federation.make_whole()
    settings = SETTINGS | {"num-rounds": 1, "runs-dir": str(tmp_path / "next")}
    following = federation.run(ROOT, settings, timeout=120)
    assert following.completed, following.lines[-20:]
    table[name] = row(name, found, play, code, state)
