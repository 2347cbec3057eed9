"""What a run below an edge makes of what is asked of it."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from flwr.app import ConfigRecord, Message, RecordDict

from flwr_distill.protocol.edge import ASK, END, GREET, from_bytes, to_bytes
from flwr_distill.protocol.edge_calls import EdgeError, NobodyThereError, call
from flwr_distill.server.edge import Commands, check_below, commands_from_above
from flwr_distill.server.settings import RunSettings
from flwr_distill.strategies.common.registry import find_strategy
from flwr_distill.task.errors import SettingsError

MESSAGE = Message(RecordDict({"config": ConfigRecord({"n": 1})}), 1, "train")


@pytest.fixture
def pool():
    with ThreadPoolExecutor(4) as pool:
        yield pool


def test_a_message_is_answered_over_the_socket(tmp_path, pool):
    socket = tmp_path / "socket"
    with commands_from_above(str(socket)) as commands:
        asked = pool.submit(call, socket, ASK, to_bytes(MESSAGE), 30.0)
        command = commands.next(30.0)
        assert command.message.content == MESSAGE.content
        assert 0 < command.due - time.monotonic() <= 31  # gRPC reckons by the wall clock
        command.answer.set_result(RecordDict({"config": ConfigRecord({"n": 2})}))
        assert from_bytes(asked.result(30)).content["config"]["n"] == 2
        assert call(socket, GREET, b"", 30.0) == b""
    with pytest.raises(NobodyThereError):
        call(socket, GREET, b"", 30.0)


def test_without_a_socket_nobody_asks():
    with commands_from_above("") as commands:
        assert commands is None


def test_what_nobody_waits_for_any_more_is_left_out():
    commands = Commands()
    with pytest.raises(EdgeError, match="did not answer within 0 s"):
        commands.ask(to_bytes(MESSAGE), 0.01)
    assert commands.next(0.1) is None


def test_more_messages_than_can_wait_are_refused():
    commands = Commands()
    for _ in range(4):
        with pytest.raises(EdgeError, match="did not answer"):
            commands.ask(to_bytes(MESSAGE), 0.001)
    with pytest.raises(EdgeError, match="too many messages"):
        commands.ask(to_bytes(MESSAGE), 0.001)


def test_the_end_wakes_who_waits_for_a_message(tmp_path):
    socket = tmp_path / "socket"
    with commands_from_above(str(socket)) as commands:
        threading.Timer(0.1, call, (socket, END, b"", 30.0)).start()
        start = time.monotonic()
        assert commands.next(60.0) is None
        assert time.monotonic() - start < 30
        assert commands.ended.is_set()


def test_a_run_that_fails_says_why_to_who_waits_and_to_who_comes(tmp_path, pool):
    socket = tmp_path / "socket"

    def run():
        with commands_from_above(str(socket)) as commands:
            assert commands.next(30.0)
            raise ValueError("the disk is full")

    failing = pool.submit(run)
    while not socket.exists():
        time.sleep(0.01)
    with pytest.raises(EdgeError, match="the run below has failed: the disk is full"):
        call(socket, ASK, to_bytes(MESSAGE), 30.0)
    with pytest.raises(ValueError, match="disk"):
        failing.result(30)


@pytest.mark.parametrize("strategy", ["fedavg", "fedhead", "hfldd", "krum", "fedlgd", "cadis"])
def test_strategies_that_train_on_can_serve_below(strategy):
    settings = RunSettings.from_run_config({"strategy": strategy, "edge": "/socket"})
    check_below(settings, *find_strategy(strategy))


@pytest.mark.parametrize("strategy", ["analytic", "fedproto", "fedmd"])
def test_strategies_that_do_not_are_refused_below_and_nowhere_else(strategy):
    found = find_strategy(strategy)
    with pytest.raises(SettingsError, match=f"'{strategy}' cannot serve below an edge"):
        check_below(RunSettings.from_run_config({"strategy": strategy, "edge": "/s"}), *found)
    check_below(RunSettings.from_run_config({"strategy": strategy}), *found)
