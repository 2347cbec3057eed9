"""A ServerApp's process ends, whatever signals come while it does."""

import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from flwr_distill.node.stock import is_another
from tests.server.run_folder import without_times

PROCESS = """
import time
from flwr.supercore.exit import register_signal_handlers
from flwr.supercore.telemetry import EventType
from flwr_distill.flower.line_1_32.server.shutdown import ignore_signals_at_the_end

def finish():
    print("ending", flush=True)
    time.sleep(1)

register_signal_handlers(EventType.FLWR_SERVERAPP_RUN_LEAVE, exit_handlers=[finish])
ignore_signals_at_the_end()
print("running", flush=True)
time.sleep(60)
"""

STOPPED = """
import sys
import time
from logging import ERROR
from pathlib import Path
from flwr.common import log
from flwr.supercore.exit import register_signal_handlers
from flwr.supercore.telemetry import EventType
from flwr_distill.flower.line_1_32.server.shutdown import at_the_end
from flwr_distill.server.record.journal import Journal

handlers = [lambda: log(ERROR, "Failed to push task output")]  # as Flower's ServerApp
register_signal_handlers(EventType.FLWR_SERVERAPP_RUN_LEAVE, exit_handlers=handlers)
with Journal(Path(sys.argv[1])) as journal:
    at_the_end(journal.stop)
    print("running", flush=True)
    time.sleep(60)
"""

AWAY = """
from flwr.supercore.exit import register_signal_handlers
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_grpc
from flwr.supercore.telemetry import EventType
from flwr.superlink.grid import GrpcGrid
from flwr.proto.appio_pb2 import PullTaskInputRequest
from flwr_distill.flower.line_1_32.server.exchange import SuperLinkExchange

grid = GrpcGrid("127.0.0.1:9", insecure=True, token="token")
sender = HeartbeatSender(make_task_heartbeat_fn_grpc(grid._stub))
handlers = [grid.close, sender.stop]
register_signal_handlers(EventType.FLWR_SERVERAPP_RUN_LEAVE, exit_handlers=handlers)
SuperLinkExchange(grid)
sender.start()
print("running", flush=True)
grid._stub.PullTaskInput(PullTaskInputRequest())
"""


@contextmanager
def running(code, *arguments):
    """A Python process that has printed that it runs."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout.readline() == "running\n"
        yield process
        assert process.wait(timeout=20) == 0
    finally:
        process.kill()
        process.stdout.close()


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_does_not_keep_a_process_that_is_ending(second):
    with running(PROCESS) as process:
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "ending\n"
        time.sleep(0.2)
        process.send_signal(second)


def test_the_journal_of_a_run_that_is_stopped_ends_with_that_and_not_with_an_error(tmp_path):
    file = tmp_path / "journal.jsonl"
    with running(STOPPED, file) as process:
        process.send_signal(signal.SIGINT)
    assert without_times(file) == [{"round": 0, "stopped": True}]


@pytest.mark.skipif(is_another(), reason="is about the connection of Flower 1.32, over gRPC")
def test_a_process_whose_superlink_is_gone_ends_by_a_signal():
    """As Flower sends it when its parent has died; its thread of heartbeats waits, too."""
    with running(AWAY) as process:
        time.sleep(3)
        process.send_signal(signal.SIGTERM)
