"""Lines of a node's log: neither a message nor an app writes one that looks like the node's."""

import io
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from flwr.common.logger import ConsoleHandler, log

from flwr_distill.base import json_lines
from flwr_distill.node import log_lines
from flwr_distill.node.log_lines import OutputQuota, escape_records, escaped, titled_output

FORGED = "1\nINFO : SuperNode ID: 7\r\x1b[2K\x9b1A\u2028\u202e"


def test_what_a_terminal_obeys_or_hides_is_escaped() -> None:
    line = escaped(FORGED)
    assert line.isprintable()
    assert line.splitlines() == [line]
    assert escaped("größer\tals 7 %") == "größer\tals 7 %"
    escaped("\ud800").encode()


@pytest.fixture
def logger() -> tuple[logging.Logger, io.StringIO]:
    stream = io.StringIO()
    logger = logging.Logger("test")
    logger.addHandler(ConsoleHandler(stream=stream))
    escape_records(logger)
    return logger, stream


def test_no_text_of_a_message_or_an_error_begins_a_line_of_the_log(
    logger: tuple[logging.Logger, io.StringIO],
) -> None:
    error = ValueError(FORGED)
    logger[0].info("[RUN %s, ROUND %s]", 5, FORGED, exc_info=error)
    first, *others = logger[1].getvalue().splitlines()
    assert first.endswith("[RUN 5, ROUND 1")
    assert others[0] == "    INFO : SuperNode ID: 7"
    assert len(others) > 4  # with what the error says
    assert all(line.startswith("    ") and line.isprintable() for line in others)


def printed(
    capfd: pytest.CaptureFixture[str],
    print_to: Callable[[int], None],
    lines: int,
    quota: OutputQuota | None = None,
) -> list[str]:
    with titled_output("app of run 7", quota or OutputQuota()) as output:
        print_to(output)
    text, deadline = "", time.monotonic() + 10
    while text.count("\n") < lines and time.monotonic() < deadline:
        time.sleep(0.02)
        text += capfd.readouterr().err
    return text.split("\n")[:-1]


def test_each_line_that_an_app_prints_has_its_title(capfd: pytest.CaptureFixture[str]) -> None:
    def print_to(output: int) -> None:
        os.write(output, b"INFO : Super\x1b[92m")
        os.write(output, b"Node ID: 7\r\nsecond\rthird\n\n\x1b[2K\xff no end")

    lines = printed(capfd, print_to, 4)
    assert [line.removeprefix("app of run 7: ") for line in lines] == [
        "INFO : SuperNode ID: 7",
        "second",
        "third",
        "\\x1b[2K\ufffd no end",
    ]
    assert all(line.startswith("app of run 7: ") for line in lines)


@pytest.mark.parametrize("text", [b"x" * 10_000, b"\x01\n" * 5_000])
def test_an_app_that_prints_without_end_fills_no_log(
    capfd: pytest.CaptureFixture[str], text: bytes
) -> None:
    """However short its lines are, and however many processes it has: titles and escapes count."""
    quota = OutputQuota(20_000)

    def print_to(output: int) -> None:
        for _ in range(100):
            os.write(output, text)  # it does not block

    lines = printed(capfd, print_to, 6, quota)
    assert "dropped" in lines[-1]
    assert max(map(len, lines)) < 2 * log_lines.MAX_LINE
    with titled_output("app of run 7", quota) as output:
        print_to(output)
    for thread in threading.enumerate():
        if thread.name == "output":
            thread.join(10)
    assert sum(map(len, lines)) + len(capfd.readouterr().err) < 30_000


@pytest.fixture
def as_json(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(json_lines.VARIABLE, "json")
    monkeypatch.setattr(json_lines, "_process", {})
    yield
    json_lines.work_on()


@pytest.fixture
def flowers_log(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What Flower's logger writes from now on."""
    handler = ConsoleHandler(stream=io.StringIO())
    monkeypatch.setattr(logging.getLogger("flwr"), "handlers", [handler])
    return handler.stream


@pytest.mark.usefixtures("as_json")
def test_whatever_a_text_has_in_it_a_record_is_one_object_on_one_line(
    flowers_log: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(json_lines.NODE, "ward-3")
    log_lines.begin("supernode")
    json_lines.work_on(7, "abc")
    log(logging.INFO, "")
    log(logging.INFO, "%s", FORGED + '", "node": "ward-9', exc_info=ValueError(FORGED))
    json_lines.work_on()
    log(logging.WARNING, "x" * 100_000)
    first, second = flowers_log.getvalue().splitlines()
    assert first.isascii()
    line = json_lines.read(first)
    assert line is not None
    assert (line.level, line.process, line.node) == ("INFO", "supernode", "ward-3")
    assert (line.run, line.message_id) == ("7", "abc")
    assert line.text.startswith(FORGED + '", "node": "ward-9')
    assert "ValueError" in line.text
    assert len(second) < 2 * json_lines.MAX_TEXT
    assert json.loads(second).keys() == {"time", "level", "process", "node", "text"}


def test_a_log_as_text_is_escaped_and_has_no_json(flowers_log: io.StringIO) -> None:
    log_lines.begin("supernode")
    json_lines.work_on(7, "abc")
    log(logging.INFO, "\x1b[2K")
    json_lines.work_on()
    assert flowers_log.getvalue().endswith(" \\x1b[2K\n")


@pytest.mark.usefixtures("as_json")
def test_each_line_that_an_app_prints_is_the_text_of_a_line(
    capfd: pytest.CaptureFixture[str],
) -> None:
    forged = json.dumps({"text": "forged", "node": "ward-9", "process": "supernode"})
    json_lines.work_on(7, "abc")

    def print_to(output: int) -> None:
        os.write(output, f"{forged}\n\x1b[91mERROR \x1b[0m:     failed\rthird\n".encode())

    lines = [json_lines.read(text) for text in printed(capfd, print_to, 3)]
    assert [(line.level, line.text) for line in lines if line] == [
        ("INFO", forged),
        ("ERROR", "failed"),
        ("INFO", "third"),
    ]
    assert {(line.process, line.node, line.message_id) for line in lines if line} == {
        ("app", "", "abc")
    }


@pytest.mark.parametrize(
    "text",
    [
        "INFO :      text",
        "{",
        "{}",
        '{"text": 7}',
        '{"text": "x", "level": "\x1b[2K"}',
        '{"text": "x", "level": "LOUD"}',
        "[" * 100_000,
        '{"text": ' + "[" * 100_000,
        '{"text": "x", "n": ' + "9" * 100_000 + "}",
    ],
)
def test_what_is_no_line_of_ours_is_none(text: str) -> None:
    assert json_lines.read(text) is None
    assert json_lines.read('{"text": "x", "node": 7, "other": []}') == json_lines.Line("x")
