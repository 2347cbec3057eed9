"""Who runs a site or a server reads within 30 s what is broken, and how to repair it."""

import re
import time

import pytest

from flwr_distill.node.processes import stop
from tests.faults import tables
from tests.faults.causes import CONTINUES, FAULTS, Site
from tests.waiting import wait_for_node

HEAD = "| fault | where shown | seconds | words |\n|---|---|---|---|\n"
DEADLINE = 30.0
QUICK = {"DNS is gone", "a port is in use", "the SuperLink's database is corrupt"}
"""What CI runs; the others are in `make test-faults-all`."""

pytestmark = [pytest.mark.faults, pytest.mark.timeout(200)]


def line_with(words, log, process):
    """Seconds until a line of a log has all words, and the line."""
    begin = time.monotonic()
    while True:
        over = time.monotonic() - begin > DEADLINE or process.poll() is not None
        text = log.read_text() if log.exists() else ""
        for line in text.splitlines():
            if all(word.lower() in line.lower() for word in words):
                return time.monotonic() - begin, line
        assert not over, f"no line has all of {words}:\n{text[-3000:]}"
        time.sleep(0.1)


def comes_up(started, site):
    if started.state_dir is None:
        site.up(started, "again")
        return
    _, log = site.start(started, "again")
    wait_for_node(started.state_dir, log)


@pytest.fixture(scope="module")
def table():
    """Rows by fault; those that ran replace theirs in the docs if CAUSES_TABLE is set."""
    rows = {}
    yield rows
    tables.write("causes", HEAD, FAULTS, rows)


@pytest.mark.parametrize(
    "fault",
    [pytest.param(f, marks=() if f in QUICK else pytest.mark.all_faults) for f in FAULTS],
)
def test_a_fault_is_named_with_its_remedy_and_the_next_start_works(fault, tmp_path, table):
    cause, words = FAULTS[fault]
    site = Site(tmp_path)
    steps = cause(site)
    try:
        broken = next(steps)
        process, log = site.start(broken, "broken")
        seconds, line = line_with(words, log, process)
        if fault not in CONTINUES:
            assert process.wait(DEADLINE) != 0
        stop([process])
        where = "SuperLink" if broken.state_dir is None else "node"
        words_of_it = line.replace(str(tmp_path), "...").replace("|", "/")
        words_of_it = words_of_it.replace(str(site.fleet), "9092")
        words_of_it = re.sub(r"the proxy 127\.0\.0\.1:\d+", "the proxy 127.0.0.1:3128", words_of_it)
        comes_up(next(steps), site)
        table[fault] = f"| {fault} | {where} | {seconds:.1f} | {words_of_it} |"
    finally:
        steps.close()
        site.stop()
