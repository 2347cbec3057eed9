"""A tiny Flower app without torch, a federation of our nodes to run it on, and certificates."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flwr_distill.fleet.certificates import CertificateFolder
from flwr_distill.fleet.local_federation import LocalFederation
from flwr_distill.fleet.submission import RunOutcome
from flwr_distill.node.supervisor import status_file
from tests.apps import pyproject

CONFIG = """
phases = 2
do = ""
nodes = 1
timeout = 60.0
load = 0
"""

CLIENT = """
import os, time
from resource import RUSAGE_SELF, getrusage
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

GREETING = "hello"
app = ClientApp()

@app.train()
def train(message: Message, context: Context) -> Message:
    do = message.content["config"]["do"]
    mine = context.node_config["partition-id"] == 0
    if do == "raise" and mine:
        raise ValueError("as asked")
    if do == "exit" and mine:
        os._exit(3)
    if do == "nothing" and mine:
        return None
    if do == "change":
        context.node_config["partition-id"] = 9
        context.run_config["do"] = "another"
    if do == "forge":
        from flwr_distill.flower.payload import Payload
        Payload.parts = lambda self: [b"no reply"]
    if do == "lose":
        import torch
        raise ValueError("lost") from torch.AcceleratorError("CUDA error: illegal memory access")
    if do.startswith("sleep"):
        time.sleep(int(do[len("sleep"):] or 8))
    faults = 0
    if do == "allocate":  # and free at once; the second time it may be there
        for _ in range(2):
            before = getrusage(RUSAGE_SELF).ru_minflt
            b"x" * 40_000_000
            faults = getrusage(RUSAGE_SELF).ru_minflt - before
    counted = context.state.metric_records.get("count", MetricRecord({"n": 0}))["n"] + 1
    context.state["count"] = MetricRecord({"n": counted})
    answer = ConfigRecord({"pid": os.getpid(), "greeting": GREETING, "count": counted,
                         "faults": faults,
                         "threads": os.environ["OMP_NUM_THREADS"],
                         "node-config": str(dict(context.node_config))})
    reply = RecordDict({"answer": answer})
    if "load" in message.content:
        arrays = message.content["load"].to_numpy_ndarrays()
        reply["load"] = ArrayRecord([array + 1 for array in arrays])
    return Message(reply, reply_to=message)
"""

SERVER = """
import json, time
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

app = ServerApp()

@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    todo = config["do"].split()
    for phase in range(config["phases"]):
        while len(nodes := sorted(grid.get_node_ids())) < config["nodes"]:
            time.sleep(0.1)
        print("BEGIN", phase, flush=True)
        start = time.monotonic()
        do = todo[phase] if phase < len(todo) else "work"
        content = RecordDict({"config": ConfigRecord({"do": do})})
        if config["load"]:  # megabytes, one an array
            draw = np.random.default_rng(phase).integers
            content["load"] = ArrayRecord(
                [draw(250, size=10**6, dtype=np.uint8) for _ in range(config["load"])]
            )
        waiting = dict(zip(grid.push_messages(
            [Message(content, dst_node_id=node, message_type="train") for node in nodes]
        ), nodes))
        replies = {}
        while waiting and time.monotonic() - start < config["timeout"]:
            for reply in grid.pull_messages(list(waiting)):
                node = waiting.pop(reply.metadata.reply_to_message_id)
                answer = ({"error": reply.error.code, "reason": reply.error.reason}
                        if reply.has_error() else dict(reply.content["answer"]))
                replies[node] = answer | {"after": time.monotonic() - start}
            time.sleep(0.02)
        print("PHASE", json.dumps(replies), flush=True)
"""


@dataclass(frozen=True)
class Reply:
    """What the tiny app's ServerApp says of one node's reply, `after` so many seconds."""

    after: float
    answer: dict[str, Any]

    @property
    def error(self) -> int:
        return int(self.answer.get("error", 0))


def phases(outcome: RunOutcome) -> list[dict[str, Reply]]:
    """The replies of each phase, by Flower's node id."""
    found = [match[1] for line in outcome.lines if (match := re.match(r"PHASE (.*)", line))]
    return [
        {node: Reply(answer.pop("after"), answer) for node, answer in json.loads(text).items()}
        for text in found
    ]


@dataclass(frozen=True)
class Tiny:
    """The tiny app on a federation."""

    federation: LocalFederation
    app_dir: Path

    def run(
        self, config: Mapping[str, Any], on_line: Callable[[str], None] | None = None
    ) -> list[dict[str, Reply]]:
        outcome = self.federation.run(self.app_dir, config, on_line=on_line, timeout=150)
        assert outcome.completed, "\n".join(outcome.lines)
        return phases(outcome)

    def status(self, index: int) -> dict[str, Any]:
        """What a node says of itself: process ids and so on."""
        status: dict[str, Any] = json.loads(
            status_file(self.federation.nodes[index].state_dir).read_text()
        )
        return status


@pytest.fixture(scope="session")
def tiny_app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the tiny app."""
    app_dir = tmp_path_factory.mktemp("tiny-app")
    write_tiny_app(app_dir)
    return app_dir


def write_tiny_app(app_dir: Path, greeting: str = "hello") -> None:
    (app_dir / "tiny").mkdir(exist_ok=True)
    (app_dir / "pyproject.toml").write_text(pyproject("tiny", CONFIG))
    (app_dir / "tiny" / "__init__.py").write_text("")
    (app_dir / "tiny" / "client.py").write_text(CLIENT.replace('"hello"', repr(greeting)))
    (app_dir / "tiny" / "server.py").write_text(SERVER)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, tiny_app: Path) -> Iterator[Tiny]:
    """Two of our nodes, without torch, for all tests of a file."""
    federation = LocalFederation(
        2,
        tmp_path_factory.mktemp("federation"),
        node_settings={"sector": 7, "preload": []},
    )
    with federation:
        yield Tiny(federation, tiny_app)


@pytest.fixture(scope="session")
def rewrite_tiny_app() -> Callable[..., None]:
    """Write the tiny app again, with another greeting."""
    return write_tiny_app


@dataclass(frozen=True)
class Certificates:
    """PEM files: an authority, another, and certificate and key by the first for loopback."""

    authority: Path
    other_authority: Path
    server: Path
    key: Path


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Certificates for servers on this machine."""
    folder = tmp_path_factory.mktemp("certificates") / "certs"
    issuer = CertificateFolder(folder)
    issuer.create(days=30)
    issuer.issue_server(["127.0.0.1", "localhost"], days=9)
    server = folder / "server"
    authorities = folder / "ca.crt", folder / "nodes-ca.crt"
    return Certificates(*authorities, server / "server.crt", server / "server.key")
