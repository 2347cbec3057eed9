"""`flwr-distill node` at its command line."""

import threading
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

import flwr_distill.cli.node
from flwr_distill.cli.main import app
from flwr_distill.node import supervisor
from flwr_distill.node.settings import NodeSettings


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[NodeSettings]:
    """Settings of the nodes that were started, none of which runs."""
    found: list[NodeSettings] = []

    class Recorded:
        def __init__(self, settings: NodeSettings) -> None:
            found.append(settings)

        def run(self) -> None:
            pass

    monkeypatch.setattr(flwr_distill.cli.node, "Node", Recorded)
    return found


def invoke(*arguments: str, env: dict[str, str] | None = None) -> Any:
    return CliRunner().invoke(app, ["node", *arguments], env=env)


def test_every_setting_can_come_from_the_environment(started: list[NodeSettings]) -> None:
    result = invoke(
        env={
            "FLWR_DISTILL_SUPERLINK": "far:9092",
            "FLWR_DISTILL_INSECURE": "1",
            "FLWR_DISTILL_NAME": "ward 3",
            "FLWR_DISTILL_PARTITION_ID": "2",
            "FLWR_DISTILL_NUM_PARTITIONS": "3",
            "FLWR_DISTILL_DEVICE": "cuda:1",
        }
    )
    assert result.exit_code == 0, result.output
    (settings,) = started
    assert (settings.superlink, settings.insecure, settings.device) == ("far:9092", True, "cuda:1")
    assert settings.app_config["name"] == "ward 3"
    assert (settings.partition_id, settings.num_partitions) == (2, 3)


def test_the_command_line_comes_before_environment_and_file(
    started: list[NodeSettings], tmp_path: Path
) -> None:
    file = tmp_path / "node.yaml"
    file.write_text(
        "superlink: from-file:1\nthreads: 3\ndevice: cpu\nsector: 1\nnode-config: {at: home}\n"
    )
    result = invoke(
        *("--config", str(file), "--superlink", "from-option:1"),
        *("--sector", "2", "--node-config", "site=2", "--node-config", "at=x y"),
        env={"FLWR_DISTILL_SUPERLINK": "from-environment:1", "FLWR_DISTILL_THREADS": "5"},
    )
    assert result.exit_code == 0, result.output
    (settings,) = started
    assert settings.superlink == "from-option:1"
    assert settings.threads == 5
    assert settings.device == "cpu"
    assert settings.sector == 2
    assert settings.node_config == {"site": 2, "at": "x y"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--superlink", "nowhere"], "superlink = 'nowhere': not an address"),
        (["--device", "gpu"], "device = 'gpu'"),
        (["--node-config", "site"], "node-config=site: give KEY=VALUE"),
        (["--config", "/no/such/file.yaml"], "config = '/no/such/file.yaml': unreadable"),
        (["--auth-key", "/no/such/key"], "/no/such/key does not exist"),
        (
            ["--insecure", "--superlink", "127.0.0.1:1", "--connect-timeout", "0"],
            "superlink = '127.0.0.1:1': no SuperLink answers",
        ),
    ],
)
def test_a_node_that_cannot_work_says_why_in_one_line_and_exits_with_1(
    arguments: list[str], said: str, tmp_path: Path
) -> None:
    result = invoke("--state-dir", str(tmp_path), *arguments)
    assert result.exit_code == 1
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_node_logs_at_its_start_what_its_folder_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data" / "cat").mkdir(parents=True)
    Image.new("L", (8, 6)).save(tmp_path / "data" / "cat" / "a.png")
    (tmp_path / "data" / "cat" / "broken.png").touch()

    def wait_for_the_log(node: supervisor.Node) -> None:
        for thread in threading.enumerate():
            if thread.name == "data":
                thread.join()

    monkeypatch.setattr(supervisor, "check_superlink", lambda *args, **kwargs: None)
    monkeypatch.setattr(supervisor.Node, "_supervise", wait_for_the_log)
    supervisor.Node(NodeSettings(data=tmp_path / "data", state_dir=tmp_path / "state")).run()
    line = capsys.readouterr().err
    assert f"data={tmp_path / 'data'}: 1 sample of 1 class (cat: 1), 6x8, L; skipped" in line
    assert "skipped 1 unusable file, first cat/broken.png: not a readable image" in line
