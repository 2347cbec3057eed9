"""Nodes as real processes on one real GPU: an error that CUDA does not recover from, sandboxes."""

from contextlib import ExitStack

import pytest
from flwr.common.constant import ErrorCode

from flwr_distill.fleet.local_federation import LocalFederation
from flwr_distill.node.sandbox import why_no_sandbox
from tests.apps import pyproject
from tests.gpu import work
from tests.node.supernodes import ROOT, SuperNode, answer, running_executor, wait_until_gone

pytestmark = pytest.mark.gpu

CLIENT = """
import os
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.train()
def train(message: Message, context: Context) -> Message:
    device = context.node_config["device"]
    values = torch.arange(8.0, device=device)
    if message.content["config"]["do"] == "assert":  # on the device: no host knows the index
        print(values[torch.tensor([99], device=device)].sum().item())
    answer = {"pid": os.getpid(), "device": device, "sum": values.sum().item()}
    return Message(RecordDict({"answer": ConfigRecord(answer)}), reply_to=message)
"""


@pytest.fixture
def app_dir(tmp_path):
    folder = tmp_path / "app" / "tiny"
    folder.mkdir(parents=True)
    (folder.parent / "pyproject.toml").write_text(pyproject("tiny"))
    (folder / "__init__.py").touch()
    (folder / "client.py").write_text(CLIENT)
    (folder / "server.py").write_text("from flwr.serverapp import ServerApp\napp = ServerApp()\n")
    return folder.parent


def test_a_failed_assertion_on_the_gpu_costs_its_node_a_worker_and_the_other_node_nothing(
    app_dir, tmp_path
):
    arguments = ("--device", work.REAL_GPU, "--preload", "torch")
    with ExitStack() as stack:
        nodes = [SuperNode(), SuperNode()]
        for number, node in enumerate(nodes):
            stack.callback(node.close)
            node.submit(app_dir)
            stack.enter_context(running_executor(node, tmp_path / str(number), *arguments))
            node.send()
        first = [answer(node.reply()) for node in nodes]
        assert [reply["device"] for reply in first] == [work.REAL_GPU] * 2
        assert first[0]["pid"] != first[1]["pid"]

        nodes[0].send("assert")
        failed = nodes[0].reply()
        assert failed.error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
        assert "device-side assert" in str(failed.error.reason)
        for node in nodes:
            node.send()
        again = [answer(node.reply()) for node in nodes]
        assert [reply["sum"] for reply in again] == [28.0, 28.0]
        assert again[0]["pid"] != first[0]["pid"]
        assert again[1]["pid"] == first[1]["pid"]
        wait_until_gone(first[0]["pid"])


@pytest.mark.skipif(bool(why_no_sandbox()), reason=f"no sandbox here: {why_no_sandbox()}")
def test_sandboxed_apps_compute_on_the_gpu(tmp_path):
    policy = {"sandbox": "required", "direct-links": False}
    settings = {"device": work.REAL_GPU, "policy": policy}
    config = {"strategy": "fedavg", "num-rounds": 1, "min-nodes": 2, "runs-dir": str(tmp_path)}
    federation = LocalFederation(2, tmp_path / "nodes", node_settings=settings)
    try:
        federation.start(timeout=45)
        outcome = federation.run(ROOT, config, timeout=60)
    finally:
        federation.stop()
        logs = [node.log.read_text() for node in federation.nodes]
        print("\n".join(logs))
    assert outcome.completed, "\n".join(outcome.lines[-40:])
    assert all("the app runs in a sandbox" in log for log in logs)
