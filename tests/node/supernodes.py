"""The executor's side of a SuperNode, without a SuperLink, and executors as real processes."""

import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.cli.build import build_fab_from_disk
from flwr.supercore.constant import TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.supernode.nodestate import NodeStateFactory
from flwr.supernode.start_client_internal import _insert_message

from flwr_distill.flower.task_identity import identify
from flwr_distill.node import stock
from flwr_distill.node.policy import OPEN
from flwr_distill.node.settings import FLOWER_HOME, NODE_CONFIG
from tests.waiting import wait_until

NODE_ID = 5
ROOT = Path(__file__).resolve().parents[2]


class SuperNode:
    """The executor's side of a SuperNode: its state and its API, without a SuperLink."""

    def __init__(self, certificates: Any = None, secret: bytes | None = None) -> None:
        objects = ObjectStoreFactory()
        states = NodeStateFactory(objects)
        self.state: Any = states.state()
        self.objects: Any = objects.store()
        self.state.set_node_id(NODE_ID)
        serve = serve_over_http if stock.is_another() else serve_over_grpc
        self.address, self.close = serve(states, objects, certificates, secret)

    def submit(self, app_dir: Path, run_id: int = 1) -> None:
        """Make a run of an app known."""
        content = build_fab_from_disk(app_dir)
        fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
        run = Run.create_empty(run_id)
        run.fab_id, run.fab_version, run.fab_hash = "tests/tiny-app", "1.0.0", fab.hash_str
        run.series_id = run_id
        node_config: dict[str, bool | float | int | str] = {"partition-id": 0}
        context = Context(run_id, NODE_ID, node_config, RecordDict(), {}, run.series_id)
        self.state.store_fab(fab)
        self.state.store_run(run)
        self.state.set_run_series_context(run.series_id, context)

    def send(
        self,
        do: str = "",
        *,
        run_id: int = 1,
        payload: bytes = b"",
        ttl: float | None = None,
        late: float = 0.0,
    ) -> None:
        """Put a message for the app, as if it had come from a SuperLink.

        As there, its task is made first; the message is there `late` seconds later.
        """
        identify(1, run_id, 1)
        config = ConfigRecord({"do": do, "payload": payload})
        message = Message(RecordDict({"config": config}), NODE_ID, "train", ttl=ttl)
        message.metadata.__dict__["_run_id"] = run_id
        self.state.create_task(
            task_type=TaskType.CLIENT_APP,
            run_id=run_id,
            fab_hash=self.state.get_run(run_id).fab_hash,
        )
        time.sleep(late)
        _insert_message(message, self.state, self.objects)

    def ask(self, do: str = "", **message: Any) -> dict[str, Any]:
        """Put a message for the app; what it answers."""
        self.send(do, **message)
        return answer(self.reply())

    def replies(self) -> Any:
        """Replies that have not been seen yet."""
        state = self.state
        return getattr(state, "get_messages_legacy", state.get_messages)(is_reply=True)

    def reply(self, seconds: float = 60.0) -> Message:
        """Wait for the app's reply."""
        header: Message = wait_until(self.replies, seconds)[0]
        if header.has_error():
            return header
        tree = self.objects.get_object_tree(header.metadata.message_id)
        contents: dict[str, bytes] = {}
        pending = [tree]
        while pending:
            node = pending.pop()
            pending += node.children
            contents[node.object_id] = wait_until(partial(self.objects.get, node.object_id))
        reply = inflate_object_from_contents(tree.object_id, contents)
        assert isinstance(reply, Message)
        return reply


def serve_over_grpc(
    states: Any, objects: Any, certificates: Any, secret: bytes | None
) -> tuple[str, Callable[[], Any]]:
    """The API of Flower 1.32: its address, and what stops it."""
    from flwr.supernode.start_client_internal import run_clientappio_api_grpc

    server = run_clientappio_api_grpc(
        address="127.0.0.1:0",
        state_factory=states,
        objectstore_factory=objects,
        certificates=certificates
        and (
            certificates.authority.read_bytes(),
            certificates.server.read_bytes(),
            certificates.key.read_bytes(),
        ),
        superexec_auth_secret=secret,
    )
    return str(server.bound_address), lambda: server.stop(None)


def serve_over_http(
    states: Any, objects: Any, certificates: Any, secret: bytes | None
) -> tuple[str, Callable[[], Any]]:
    """The API of newer Flowers."""
    import uvicorn  # they bring it
    from flwr.supernode.main import create_app

    files = {}
    if certificates is not None:
        files = {"ssl_certfile": certificates.server, "ssl_keyfile": certificates.key}
    app = create_app(state_factory=states, superexec_auth_secret=secret)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, **files))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]

    def stop() -> None:
        server.should_exit = True
        thread.join(timeout=10)

    return f"127.0.0.1:{port}", stop


@contextmanager
def running_executor(
    node: SuperNode, home: Path, *arguments: str
) -> Iterator[subprocess.Popen[str]]:
    """Run an executor with the policy `open`; `home` is the node's state directory."""
    paths = filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)])  # it may not be installed
    home.mkdir(parents=True, exist_ok=True)
    (home / NODE_CONFIG).touch()
    process = subprocess.Popen(
        [
            *(sys.executable, "-P", "-m", "flwr_distill.flower.executor"),
            *("--appio-address", node.address),
            *("--state-dir", str(home), "--policy", OPEN.model_dump_json(by_alias=True)),
            *arguments,
        ],
        env={
            **os.environ,
            "FLWR_HOME": str(home / FLOWER_HOME),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(paths),
        },
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def answer(reply: Message) -> dict[str, Any]:
    assert not reply.has_error(), reply.error
    return dict(reply.content.config_records["answer"])


def wait_until_gone(pid: int) -> None:
    wait_until(lambda: not psutil.pid_exists(pid))
