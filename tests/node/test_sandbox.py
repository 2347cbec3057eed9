"""What a sandboxed app can reach; skipped, loudly, where no sandbox can be made."""

import json
import os
import socket
import subprocess
import sys
import threading

import pytest

from flwr_distill.node.nursery import NURSERY
from flwr_distill.node.run_sandbox import RunSandboxes
from flwr_distill.node.sandbox import sandbox_command, why_no_sandbox
from flwr_distill.node.settings import NodeError, NodeSettings
from flwr_distill.node.supervisor import Node
from flwr_distill.protocol.edge import DOOR, OPEN
from flwr_distill.protocol.edge_calls import listen
from tests.errors import at

needs_sandbox = pytest.mark.skipif(
    bool(why_no_sandbox()), reason=f"no sandbox here: {why_no_sandbox()}"
)

SANDBOXED = {"sandbox": "required", "direct-links": False}

PROBE = """
import json, os, socket, sys
from pathlib import Path

def tried(action):
    try:
        return action()
    except OSError as error:
        return type(error).__name__

def through(port):
    with socket.create_connection(("127.0.0.1", port), timeout=5) as line:
        line.sendall(b"ping")
        return line.recv(4).decode()

names = json.loads(sys.argv[1])
print(json.dumps({
    "network": tried(lambda: through(names["port"])),
    **{name: tried(Path(path).read_text) for name, path in names["read"].items()},
    **{name: tried(lambda: Path(path).write_text("!")) for name, path in names["write"].items()},
    "password": os.environ.get("PASSWORD"),
    "threads": os.environ.get("OMP_NUM_THREADS"),
    "processes": sum(name.isdigit() for name in os.listdir("/proc")),
}))
"""


@pytest.fixture
def settings(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "sample").write_text("a scan")
    (tmp_path / "secret").write_text("another user's")
    state = tmp_path / "state" / "node"
    for name in ("outbox/log.jsonl", "lifetime-epsilon.json", "appio-secret", "runs/1/2/kept"):
        (state / name).parent.mkdir(parents=True, exist_ok=True)
        (state / name).write_text("the node's")
    return NodeSettings(data=data, state_dir=state, policy=SANDBOXED)


@pytest.fixture
def echo():
    """The port of a server that sends back what it gets."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            while True:
                try:
                    line, _ = server.accept()
                except OSError:
                    return
                with line:
                    line.sendall(line.recv(4))

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]


@needs_sandbox
def test_an_app_reaches_its_data_and_nothing_else(settings, echo, tmp_path, monkeypatch):
    packages = [path for path in sys.path if not tmp_path.is_relative_to(path or tmp_path)]
    monkeypatch.setattr(sys, "path", packages)  # where PYTHONPATH names /tmp, all of it is inside
    state = settings.state_dir
    names = {
        "port": echo,
        "read": {
            "data": str(settings.data / "sample"),
            "kept": str(state / "runs/1/2/kept"),
            "log": str(state / "outbox/log.jsonl"),
            "account": str(state / "lifetime-epsilon.json"),
            "node's secret": str(state / "appio-secret"),
            "elsewhere": str(tmp_path / "secret"),
        },
        "write": {
            "new data": str(settings.data / "new"),
            "new state": str(state / "runs/1/2/new"),
            "python": str(sys.prefix) + "/new",
            "beside it": str(state / "new"),
            "root": "/new",
            "devices": "/dev/new",
            "temporary": "/tmp/new",
        },
    }
    environment = {"PATH": "/usr/bin", "PASSWORD": "1234", "OMP_NUM_THREADS": "1"}
    sandbox = RunSandboxes(sandbox_command(settings, environment), state, None).of_run(1, "0" * 64)
    command = [*sandbox.command, sys.executable, "-I", "-c", PROBE, json.dumps(names)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "network": "ConnectionRefusedError",
        "data": "a scan",
        "kept": "the node's",
        "log": "FileNotFoundError",
        "account": "FileNotFoundError",
        "node's secret": "FileNotFoundError",
        "elsewhere": "FileNotFoundError",
        "new data": "OSError",
        "new state": 1,
        "python": "OSError",
        "beside it": "OSError",
        "root": "OSError",
        "devices": "OSError",
        "temporary": 1,
        "password": None,
        "threads": "1",
        "processes": 2,
    }
    assert (state / "runs/1/2/new").read_text() == "!"


@needs_sandbox
def test_what_the_policy_calls_readable_can_be_read(settings, tmp_path):
    policy = settings.policy.model_copy(update={"readable": [str(tmp_path / "secret")]})
    command = sandbox_command(settings.model_copy(update={"policy": policy}), {})
    command = [*command, "cat", str(tmp_path / "secret")]
    assert subprocess.run(command, capture_output=True, timeout=60).stdout == b"another user's"


@needs_sandbox
def test_an_app_cannot_have_the_nursery_fork_outside_where_its_folder_is_readable(
    settings, tmp_path
):
    folder = tmp_path / "nursery"
    folder.mkdir()
    policy = settings.policy.model_copy(update={"readable": [str(tmp_path)]})
    command = sandbox_command(
        settings.model_copy(update={"policy": policy}), {NURSERY: str(folder)}
    )
    code = "import os, sys; print(os.listdir(sys.argv[1]))"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(folder / "parts"))
        done = subprocess.run(
            [*command, sys.executable, "-I", "-c", code, str(folder)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.stdout.strip() == "[]", done.stderr


@needs_sandbox
def test_the_app_of_an_edges_node_can_call_the_edge_and_see_nothing_else_of_it(settings, tmp_path):
    edge = tmp_path / "sockets"
    edge.mkdir()
    (tmp_path / "below").write_text("the edge's")
    server = listen(edge / DOOR, {OPEN: lambda request, seconds: b"pong"}, threads=1)
    settings = NodeSettings(edge=edge, state_dir=settings.state_dir, policy=SANDBOXED)
    code = (
        "import sys; from pathlib import Path; from flwr_distill.protocol.edge_calls import call; "
        "print(call(Path(sys.argv[1]), sys.argv[2], b'', 60), Path(sys.argv[3]).exists())"
    )
    names = [str(edge / DOOR), OPEN, str(tmp_path / "below")]
    ended = subprocess.run(
        [*sandbox_command(settings, dict(os.environ)), sys.executable, "-c", code, *names],
        capture_output=True,
        text=True,
        timeout=240,
    )
    server.stop(grace=None).wait()
    assert ended.stdout.strip() == "b'pong' False", ended.stderr


def test_a_node_that_must_sandbox_does_not_start_where_it_cannot(settings, monkeypatch, capsys):
    monkeypatch.setattr("flwr_distill.node.supervisor.why_no_sandbox", lambda: "bwrap is forbidden")
    with pytest.raises(
        NodeError, match="bwrap is forbidden", check=at("policy: sandbox", value="required")
    ):
        Node(settings)._decide_on_sandbox()
    policy = settings.policy.model_copy(update={"sandbox": "where-possible"})
    node = Node(settings.model_copy(update={"policy": policy}))
    node._decide_on_sandbox()
    text = capsys.readouterr().err
    assert "Not enforced: no sandbox, bwrap is forbidden. The app has this user's files" in text
    assert not node._sandboxed
    monkeypatch.setattr("flwr_distill.node.supervisor.why_no_sandbox", str)
    for each in (settings.policy, policy):
        node = Node(settings.model_copy(update={"policy": each}))
        node._decide_on_sandbox()
        assert "Policy: Enforced: the app runs in a sandbox." in capsys.readouterr().err
        assert node._sandboxed


@needs_sandbox
def test_namespace_packages_of_an_installation_are_in_the_sandbox(settings, tmp_path, monkeypatch):
    """As pip install --target makes one: google.protobuf is in a folder without __init__.py."""
    folder = tmp_path / "packages"
    (folder / "space" / "part").mkdir(parents=True)
    (folder / "space" / "part" / "__init__.py").write_text("WORDS = 'from part'\n")
    (folder / "part-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(folder)
    code = "import sys; sys.path.insert(0, sys.argv[1]); from space.part import WORDS; print(WORDS)"
    done = subprocess.run(
        [*sandbox_command(settings, {}), sys.executable, "-I", "-c", code, str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.strip() == "from part", done.stderr
