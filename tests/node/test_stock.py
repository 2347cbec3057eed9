"""A node on a Flower without a SuperNode of ours runs Flower's own, and says what that lacks."""

from pathlib import Path

import pytest

from fleet import line
from fleet.flower_1_32.superlink import Control, SuperLinkError
from fleet.local_federation import LocalFederation
from node import stock
from node.policy import HOSPITAL, OPEN
from node.settings import NodeError, NodeSettings
from node.stock import check_stock, is_stock, supernode_command


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (stock, line):
        monkeypatch.setattr(module, "version", lambda name: "1.41.0")


def test_the_flower_of_the_lock_is_not_stock() -> None:
    assert not is_stock()


@pytest.mark.usefixtures("newer")
def test_another_flower_is_and_the_log_says_what_is_slower() -> None:
    assert is_stock()
    assert "flwr 1.41.0" in (said := check_stock(NodeSettings(policy=OPEN)))
    assert "slower" in said


@pytest.mark.usefixtures("newer")
@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (NodeSettings(), "policy"),
        (NodeSettings(policy=HOSPITAL), "policy"),
        (NodeSettings(policy=OPEN, metrics_port=9000), "metrics-port=9000"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_setting_and_remedy(
    settings: NodeSettings, named: str
) -> None:
    with pytest.raises(NodeError, match=rf"{named}.*flwr 1\.41\.0.*install flwr==1\.32\.1"):
        check_stock(settings)


@pytest.mark.parametrize(
    ("number", "port"),
    [
        ("1.34.0", ["--clientappio-api-address", "127.0.0.1:7777"]),
        ("1.35.0", ["--port", "7777"]),
        ("1.41.0", ["--port", "7777"]),
    ],
)
def test_flowers_own_supernode_gets_the_nodes_settings(
    number: str, port: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stock, "version", lambda name: number)
    authority, key = tmp_path / "ca.crt", tmp_path / "node.key"
    authority.touch()
    key.touch()
    settings = NodeSettings(superlink="host:9092", root_certificates=authority, auth_key=key)
    program, *arguments = supernode_command(settings, tmp_path / "node-config.toml", 7777)
    assert Path(program).name == "flower-supernode"
    expected = ["--superlink", "host:9092", "--node-config", str(tmp_path / "node-config.toml")]
    expected += [*port, "--root-certificates", str(authority)]
    assert arguments == [*expected, "--auth-supernode-private-key", str(key)]


@pytest.mark.usefixtures("newer")
def test_the_fleets_tools_say_which_flower_they_speak_to(tmp_path: Path) -> None:
    with pytest.raises(SuperLinkError, match=r"flwr 1\.41\.0 .* flwr==1\.32\.1, or .*`flwr run`"):
        Control("127.0.0.1:1")
    with pytest.raises(RuntimeError, match=r"flwr==1\.32\.1"):
        LocalFederation(1, tmp_path).start()
