"""A federation where proxies are set, and in the folder of another Flower project."""

import os
import subprocess
from pathlib import Path

import pytest

from flwr_distill.fleet.local_federation import LocalFederation
from tests.environments import PROGRAM
from tests.proxies import proxy
from tests.waiting import node_status, wait_until

FILES = ("task", "client_app", "server_app", "client", "server", "node")


def train(folder: Path, environment: dict[str, str], settings: str) -> None:
    """Start a node, train a round, and end the federation."""
    env = {**os.environ, **environment}
    where = ("--state-dir", str(folder.parent / "state"))
    with subprocess.Popen(
        [*PROGRAM, "up", "--nodes", "1", *where],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=folder,
        env=env,
        text=True,
    ) as up:
        try:
            assert up.stdout is not None
            printed = []
            for line in up.stdout:
                printed.append(line)
                if "is online" in line:
                    break
            else:
                pytest.fail("".join(printed))
            config = f"num-rounds=1 {settings}"
            ran = subprocess.run(
                [*PROGRAM, "run", "-c", config, *where],
                capture_output=True,
                text=True,
                cwd=folder,
                env=env,
                timeout=200,
            )
            assert ran.returncode == 0, ran.stdout + ran.stderr
            assert "round   1/1" in ran.stdout
        finally:
            up.terminate()


@pytest.mark.slow
def test_up_and_run_need_no_proxy_where_one_is_set_that_refuses(tmp_path: Path) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    with proxy() as refusing:
        train(folder, refusing.variables, 'strategy="fedavg"')
    assert refusing.requests == []


@pytest.mark.slow
def test_a_node_signs_on_at_a_remote_superlink_through_the_proxy(tmp_path: Path) -> None:
    with (
        LocalFederation(1, tmp_path / "federation") as federation,
        proxy(connects_to=federation.fleet_address) as connecting,
    ):
        where = ("--superlink", "superlink.example:9092", "--state-dir", str(tmp_path / "node"))
        node = subprocess.Popen(
            [*PROGRAM, "node", "--insecure", *where],
            env={**os.environ, "https_proxy": connecting.url, "no_proxy": "", "no_grpc_proxy": ""},
        )
        try:
            wait_until(lambda: "online" in node_status(tmp_path / "node"), 100)
        finally:
            node.terminate()
            node.wait(30)
    targets = [request.partition(" HTTP")[0] for request in connecting.requests]
    assert len(targets) > 1  # the check, and Flower's SuperNode
    assert set(targets) == {"CONNECT superlink.example:9092"}


@pytest.mark.slow
@pytest.mark.parametrize("python_path", [".", "FOLDER"])
def test_up_and_run_train_beside_a_flower_projects_files_with_a_plug_in_among_them(
    tmp_path: Path, python_path: str
) -> None:
    folder = tmp_path / "quickstart"
    folder.mkdir()
    for name in FILES:
        (folder / f"{name}.py").write_text(f"raise SystemExit('{name}.py of the quickstart')\n")
    (folder / "anchors.py").write_text(
        "from flwr.serverapp.strategy import FedAvg\n\n\nclass Anchors(FedAvg):\n    pass\n"
    )
    environment = {"PYTHONPATH": python_path.replace("FOLDER", str(folder))}
    train(folder, environment, 'strategy="anchors:Anchors"')
