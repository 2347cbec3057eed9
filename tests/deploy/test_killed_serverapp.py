"""`flwr-distill superlink` reports ServerApps that are killed."""

import signal
import subprocess

import psutil
import pytest

from flwr_distill.fleet.local_federation import free_ports
from flwr_distill.node.processes import start_bound, stop
from tests.waiting import wait_until


@pytest.fixture
def superlink(tmp_path, env):
    """A SuperLink that starts ServerApps itself; its Control API's address, and its process."""
    fleet, control, serverappio = (f"127.0.0.1:{port}" for port in free_ports(3))
    command = [
        *("flwr-distill", "superlink", "--insecure", "--fleet-api-address", fleet),
        *("--control-api-address", control, "--serverappio-api-address", serverappio),
    ]
    log = tmp_path / "superlink.log"
    process = start_bound(command, env=env | {"FLWR_HOME": str(tmp_path)}, log=log)
    yield control, process
    stop([process])


def test_a_killed_serverapp_ends_its_run_within_30_s_with_the_signal(superlink, env, tmp_path):
    control, process = superlink
    settings = f'num-rounds=1 phase-timeout=120 runs-dir="{tmp_path / "runs"}"'
    run = subprocess.Popen(
        ["flwr-distill", "run", "--superlink", control, "--insecure", "-c", settings],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_until(lambda: list(tmp_path.glob("runs/*/journal.jsonl")))
    (serverapp,) = [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if "flwr_distill.fleet.serverapp" in child.cmdline() and not child.children()
    ]
    serverapp.send_signal(signal.SIGKILL)
    said, _ = run.communicate(timeout=30)
    assert run.returncode == 1
    assert "SIGKILL" in said
    assert "resume" in said
