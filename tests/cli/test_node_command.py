"""`flwr-distill node` at its command line."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import cli.node
from cli.main import app
from node.settings import NodeSettings


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[NodeSettings]:
    """Settings of the nodes that were started, none of which runs."""
    found: list[NodeSettings] = []

    class Recorded:
        def __init__(self, settings: NodeSettings) -> None:
            found.append(settings)

        def run(self) -> None:
            pass

    monkeypatch.setattr(cli.node, "Node", Recorded)
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
        (["--superlink", "nowhere"], "superlink=nowhere is not an address"),
        (["--device", "gpu"], "device=gpu"),
        (["--node-config", "site"], "node-config=site: give KEY=VALUE"),
        (["--config", "/no/such/file.yaml"], "config=/no/such/file.yaml cannot be read"),
        (["--auth-key", "/no/such/key"], "/no/such/key does not exist"),
        (
            ["--insecure", "--superlink", "127.0.0.1:1", "--connect-timeout", "0"],
            "no SuperLink answers at superlink=127.0.0.1:1",
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
