"""`flwr-distill logs`: lines of server and nodes in order, whatever is in them."""

import json
import signal
import time
from itertools import pairwise

import pytest

from flwr_distill.base.json_lines import MAX_TEXT, VARIABLE
from flwr_distill.cli import logs
from flwr_distill.cli.connection import Connection
from flwr_distill.fleet.federation_record import FederationFile, FederationRecord
from flwr_distill.flower.control import KnownRun, RunStatus

from .commands import assert_refused, command

RUN = 7391
NOW = "2026-11-28T12:00:{:02}.000+00:00"


def line(second, text, **about):
    return json.dumps({"time": NOW.format(second), "level": "INFO", "text": text, **about})


class Control:
    """Of a SuperLink with a finished run, whose log has these lines."""

    def __init__(self, lines):
        self._lines = lines

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def runs(self):
        return [KnownRun(run, RunStatus("running"), 1.0) for run in (11, RUN)]

    def log(self, run_id, after, seconds):
        assert run_id == RUN
        if not after:
            yield "".join(f"{line}\n" for line in self._lines), 1.0

    def run_status(self, run_id):
        return RunStatus("finished:completed")


@pytest.fixture
def show(tmp_path, monkeypatch):
    """Show the logs of a federation: lines of the server, and of its node."""
    monkeypatch.delenv(VARIABLE, raising=False)
    state, node = tmp_path / "state", tmp_path / "state" / "node-0"
    node.mkdir(parents=True)
    file = FederationFile(state)
    file.lock()
    file.write(FederationRecord(1, "127.0.0.1:1", "home", [str(node)], str(tmp_path)))

    def run(*arguments, server=(), own=()):
        monkeypatch.setattr(Connection, "open", lambda self, timeout: Control(server))
        text = "".join(f"{line}\n" for line in own)
        (node / "node.log").write_bytes(text.encode("utf-8", "surrogateescape"))
        return command("logs", *arguments, "--state-dir", state)

    yield run
    file.unlock()


def test_lines_of_a_run_come_by_their_times_with_the_id_that_joins_them(show):
    about = {"run": str(RUN), "message_id": "0123456789abcdef", "node": "node-0"}
    server = [
        "INFO :      Start `flwr-serverapp` process",
        line(1, "train, node-0: sent", process="serverapp", **about),
        line(4, "train, node-0: replied", process="serverapp", **about),
        line(5, "round 1", process="serverapp", run=str(RUN)),
    ]
    own = [
        line(2, "Receiving", process="supernode", **about),
        line(3, "Sending", process="supernode", **about),
        line(3, "of another run", process="supernode", **{**about, "run": "11"}),
        line(3, "a node itself", process="node", node="node-0"),
    ]
    everything = show("73", server=server, own=own)
    assert everything.exit_code == 0, everything.output
    assert everything.stdout.splitlines() == [
        "server  INFO  Start `flwr-serverapp` process",
        "12:00:01.000  server  01234567  INFO  train, node-0: sent",
        "12:00:02.000  node-0 supernode  01234567  INFO  Receiving",
        "12:00:03.000  node-0 supernode  01234567  INFO  Sending",
        "12:00:04.000  server  01234567  INFO  train, node-0: replied",
        "12:00:05.000  server  INFO  round 1",
    ]
    of_node = show("latest", "node-0", server=server, own=own)
    assert of_node.stdout.splitlines() == everything.stdout.splitlines()[1:-1]


def test_a_node_can_write_what_it_wants_and_nothing_obeys_it(show):
    forged = f"{line(9, 'forged', process='serverapp')}"
    about = {"run": str(RUN), "node": "\x1b[2Jnode-0" + "n" * 999, "process": "supernode"}
    own = [
        "not JSON " + str(RUN),
        "\udcff\udcfe" + str(RUN),
        json.dumps({"text": 7, "run": str(RUN)}),
        json.dumps({"text": "x", "level": "LOUD", "run": str(RUN)}),
        line(1, f"\x1b[2Ja\r\n{forged}\u2028" + "x" * 50_000, **about),
        line(2, "y" * logs.MAX_LINE, **about),
        line(3, "last", **about),
    ]
    shown = show("latest", own=own)
    assert shown.exit_code == 0
    first, second, third, last = shown.stdout.splitlines()
    assert "\x1b" not in shown.stdout
    assert first.startswith("12:00:01.000  \\x1b[2Jnode-0nnn")
    assert second.startswith("    " + forged)
    assert third.startswith("    xxx")
    assert len(shown.stdout) < 2 * MAX_TEXT
    assert last.endswith("  INFO  last")
    assert len(last) < 200


def test_a_line_that_is_being_written_waits_for_its_end(tmp_path):
    file, text = tmp_path / "node.log", line(1, "x", run="7")
    shown = logs._Shown(None, "7", "", [file])
    for part, count in ((text[:20], 0), (text[20:], 0), ("\n", 1), (text + "\n" + text, 1)):
        with file.open("a") as opened:
            opened.write(part)
        assert len([*shown._new_lines_of_nodes()]) == count


def lines_of(shown):
    return [entry.text for entry in shown._new_lines_of_nodes()]


def test_a_log_that_is_cut_or_begun_again_is_read_from_its_start(tmp_path):
    file = tmp_path / "node.log"
    shown = logs._Shown(None, "7", "", [file])
    file.write_text(2 * (line(1, "before", run="7") + "\n"))
    assert lines_of(shown) == ["before"] * 2
    file.write_text(line(2, "after", run="7") + "\n")
    assert lines_of(shown) == ["after"]


def test_a_log_that_vanishes_or_cannot_be_read_hides_no_other(tmp_path):
    files = [tmp_path / "missing.log", tmp_path, tmp_path / "node.log"]
    files[2].write_text(line(1, "x", run="7") + "\n")
    assert lines_of(logs._Shown(None, "7", "", files)) == ["x"]


def test_the_end_of_a_line_that_is_too_long_is_no_line(tmp_path):
    file = tmp_path / "node.log"
    after = line(2, "next", run="7")
    file.write_text("x" * 2 * logs.MAX_LINE + line(1, "forged", run="7") + f"\n{after}\n")
    assert lines_of(logs._Shown(None, "7", "", [file])) == ["next"]


def test_a_line_of_the_server_is_of_the_server_whatever_it_says(show):
    forged = line(1, "forged", node="node-0", process="supernode")
    server = [forged, line(2, "also", run=str(RUN), node="node-0", process="supernode")]
    first, second = show("latest", server=server).stdout.splitlines()
    assert first.startswith("server  INFO  {")
    assert "  server  INFO  also" in second


def test_a_reader_that_is_gone_ends_the_command_at_once(show, monkeypatch):
    def gone(self, line):
        raise SystemExit(1)

    monkeypatch.setattr(logs._Shown, "_print_line", gone)
    monkeypatch.setattr(logs, "follow", lambda *_: time.sleep(60))
    was = signal.signal(signal.SIGINT, signal.default_int_handler)  # test runners may ignore it
    start = time.monotonic()
    try:
        shown = show("latest", own=[line(1, "x", run=str(RUN))])
    finally:
        signal.signal(signal.SIGINT, was)
    assert shown.exit_code == 1
    assert time.monotonic() - start < 30


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("latest", "ward-9"), ("no line is about ward-9", RUN, "--log-format json")),
        (("9",), ("no run 9",)),
    ],
)
def test_what_is_not_there_ends_the_command_with_the_remedy(show, arguments, words):
    assert_refused(show(*arguments, server=["INFO :      text"]), "flwr-distill logs", *words)


def test_a_log_as_text_is_shown_as_it_came(show):
    server = ["INFO :      one", "\x1b[93mWARNING \x1b[0m:   two\x1b[2J", "three"]
    shown = show("latest", server=server).stdout.splitlines()
    assert [text.split("  ")[-1] for text in shown] == ["one", "two\\x1b[2J", "three"]
    assert all(a <= b for a, b in pairwise(text.split()[0] for text in shown))
