"""A node on another Flower than the lock's says what is missing, and does what it can there."""

from pathlib import Path
from typing import Any

import pytest

from flwr_distill.fleet.local_federation import LocalFederation
from flwr_distill.flower import lines
from flwr_distill.flower.control import SuperLinkError, User, open_control
from flwr_distill.node import stock
from flwr_distill.node.policy import HOSPITAL, OPEN, STANDARD, Policy
from flwr_distill.node.settings import NodeError, NodeSettings
from flwr_distill.node.stock import check_another, is_another, is_stock, supernode_command
from tests.errors import at


def install(number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (stock, lines):
        monkeypatch.setattr(module, "version", lambda name: number)


@pytest.fixture(params=["1.36.0", "1.41.0", "1.42.0"])
def newer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A Flower with a folder for its line."""
    install(request.param, monkeypatch)
    return str(request.param)


@pytest.fixture
def in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Flower without one."""
    install("1.34.0", monkeypatch)


def test_the_flower_of_the_lock_is_neither_another_nor_stock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install("1.32.1", monkeypatch)
    assert not is_another()
    assert not is_stock()


@pytest.mark.usefixtures("in_between")
def test_a_flower_without_a_folder_is_stock_and_the_log_says_what_is_slower() -> None:
    assert is_another()
    assert is_stock()
    assert "flwr 1.34.0" in (text := check_another(NodeSettings(policy=OPEN)))
    assert "slower" in text


def test_one_with_a_folder_has_any_policy_and_metrics(newer: str) -> None:
    assert is_another()
    assert not is_stock()
    assert f"flwr {newer}" in check_another(NodeSettings(policy=STANDARD, metrics_port=9000))


@pytest.mark.usefixtures("in_between")
@pytest.mark.parametrize("policy", [STANDARD, HOSPITAL.model_copy(update={"fewest_of_a_class": 1})])
def test_a_policy_that_cannot_be_kept_is_refused_with_setting_and_remedy(policy: Policy) -> None:
    with pytest.raises(NodeError, check=at("policy")) as refused:
        check_another(NodeSettings(policy=policy))
    assert "flwr 1.34.0" in refused.value.problem
    assert "install flwr==1.32.1" in refused.value.remedy


@pytest.mark.usefixtures("in_between")
def test_nothing_is_known_of_flowers_own_supernode_so_there_are_no_metrics() -> None:
    with pytest.raises(NodeError, check=at("metrics-port", value=9000)):
        check_another(NodeSettings(policy=OPEN, metrics_port=9000))


@pytest.mark.usefixtures("in_between")
@pytest.mark.parametrize(("name", "value"), [("max-rate", 5.0), ("quiet-hours", "08:00-18:00")])
def test_flowers_own_supernode_does_not_limit_its_link(name: str, value: Any) -> None:
    with pytest.raises(NodeError, check=at(name, value=value)) as refused:
        check_another(NodeSettings(policy=OPEN, **{name.replace("-", "_"): value}))
    assert "flwr 1.34.0" in refused.value.problem
    assert "install flwr==1.32.1" in refused.value.remedy


@pytest.mark.usefixtures("in_between")
def test_flowers_own_supernode_writes_no_json() -> None:
    with pytest.raises(NodeError, check=at("log-format", value="json")):
        check_another(NodeSettings(policy=OPEN, log_format="json"))


@pytest.mark.parametrize(
    ("number", "port"),
    [
        ("1.34.0", ["--clientappio-api-address", "127.0.0.1:7777"]),
        ("1.35.0", ["--host", "127.0.0.1", "--port", "7777"]),
        ("1.41.0", ["--host", "127.0.0.1", "--port", "7777"]),
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


@pytest.mark.usefixtures("in_between")
def test_a_federation_with_a_flower_without_a_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"flwr 1\.34\.0 .* flwr==1\.32\.1, or .*`flwr run`"):
        LocalFederation(1, tmp_path).start()


@pytest.mark.usefixtures("newer")
def test_a_user_of_a_gate_is_refused_where_flowers_command_makes_the_calls(tmp_path: Path) -> None:
    with pytest.raises(SuperLinkError, check=at("user-certificate")):
        open_control("127.0.0.1:1", None, User(tmp_path / "user.crt", tmp_path / "user.key"))
