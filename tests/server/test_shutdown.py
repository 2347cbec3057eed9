"""A ServerApp's process ends, whatever signals come while it does."""

import signal
import subprocess
import sys
import time

import pytest

PROCESS = """
import time
from flwr.supercore.exit import register_signal_handlers
from flwr.supercore.telemetry import EventType
from server.flower_1_32.shutdown import ignore_signals_at_the_end

def finish():
    print("ending", flush=True)
    time.sleep(1)

register_signal_handlers(EventType.FLWR_SERVERAPP_RUN_LEAVE, exit_handlers=[finish])
ignore_signals_at_the_end()
print("running", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_does_not_keep_a_process_that_is_ending(second):
    command = [sys.executable, "-c", PROCESS]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "running\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "ending\n"
        time.sleep(0.2)
        process.send_signal(second)
        assert process.wait(timeout=20) == 0
    finally:
        process.kill()
        process.stdout.close()
