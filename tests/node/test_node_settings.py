"""A node's settings: where they come from, and the errors of wrong ones."""

from pathlib import Path
from typing import Any

import pytest

from flwr_distill.client.session import own_file
from flwr_distill.node.policy import HOSPITAL, OPEN, STANDARD, Policy
from flwr_distill.node.settings import NodeError, NodeSettings, load_settings
from flwr_distill.node.supervisor import app_config
from flwr_distill.task.errors import SettingsError
from tests.errors import at


def test_options_come_before_the_file_and_the_file_before_defaults(tmp_path: Path) -> None:
    file = tmp_path / "node.yaml"
    file.write_text("superlink: far:9092\npartition-id: 3\nnum-partitions: 5\nthreads: 2\n")
    settings = load_settings(file, {"partition_id": 4, "threads": None})
    assert settings.superlink == "far:9092"
    assert settings.partition_id == 4
    assert settings.threads == 2
    assert settings.device == "auto"


def test_apps_see_the_agreed_keys_and_what_the_user_adds(tmp_path: Path) -> None:
    settings = load_settings(
        None,
        {
            "partition_id": 1,
            "num_partitions": 2,
            "data": tmp_path,
            "state_dir": tmp_path / "state",
            "sector": 4,
            "node_config": {"site": "lab"},
        },
    )
    assert settings.app_config == {
        "partition-id": 1,
        "num-partitions": 2,
        "device": "auto",
        "data": str(tmp_path),
        "real-per-virtual": STANDARD.real_per_virtual,
        "state-dir": str(tmp_path / "state"),
        "sector": 4,
        "site": "lab",
    }


def test_a_node_with_a_data_set_of_its_own_needs_no_number_of_partitions() -> None:
    settings = load_settings(None, {"dataset": "usps", "partition_id": 3})
    config = settings.app_config
    assert (config["dataset"], config["partition-id"]) == ("usps", 3)
    assert "num-partitions" not in config


@pytest.mark.parametrize("authority", ["nodes-ca.crt", None])
def test_apps_see_the_peer_address_and_what_proves_the_node(
    tmp_path: Path, authority: str | None
) -> None:
    files = {n: tmp_path / n for n in ("ca.crt", "nodes-ca.crt", "node.crt", "node.key")}
    for file in files.values():
        file.touch()
    given = {
        "root_certificates": files["ca.crt"],
        "peer_address": "node7:9200",
        "peer_authority": files[authority] if authority else None,
        "peer_certificate": files["node.crt"],
        "peer_key": files["node.key"],
    }
    config = load_settings(None, given).app_config
    assert {k: v for k, v in config.items() if k.startswith("peer-")} == {
        "peer-address": "node7:9200",
        "peer-authority": str(files[authority or "ca.crt"]),
        "peer-certificate": str(files["node.crt"]),
        "peer-key": str(files["node.key"]),
    }


@pytest.mark.parametrize("address", ["127.0.0.1:9200", "localhost:9200", "[::1]:9200"])
def test_an_address_on_loopback_needs_no_certificate(address: str) -> None:
    assert load_settings(None, {"peer_address": address}).app_config["peer-address"] == address


@pytest.mark.parametrize(
    "given",
    [
        {"peer_address": "node7"},
        {"device": "gpu"},
        {"data": "/nowhere/at/all"},
        {"sector": -1},
        {"threads": 0},
        {"release_after": 0},
        {"keep_runs": 0},
        {"poll_busy": 0},
        {"poll_idle": 601},
        {"max_rate": 0},
        {"max_rate": "5Mbit"},
        {"max_rate": float("inf")},
        {"quiet_hours": "8-18"},
        {"connect_timeout": -1},
        {"metrics_port": 0},
        {"metrics_port": 65536},
        {"superlnk": "x"},
    ],
    ids=str,
)
def test_a_wrong_setting_is_named_with_its_value(given: dict[str, Any]) -> None:
    ((name, value),) = given.items()
    with pytest.raises(NodeError, check=at(name.replace("_", "-"), value=value)):
        load_settings(None, given)


def test_all_wrong_settings_are_named_in_one_line() -> None:
    with pytest.raises(NodeError, match=r"^sector = -1: .*threads = 0: .*$"):
        load_settings(None, {"sector": -1, "threads": 0})


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"peer_address": "node7:9200"}, ["peer-address=node7:9200", "peer-certificate"]),
        ({"peer_address": "0.0.0.0:9200"}, ["peer-address=0.0.0.0:9200", "peer-certificate"]),
        ({"peer_key": __file__}, ["peer-certificate", "peer-key"]),
        ({"peer_authority": __file__}, ["peer-authority", "peer-certificate"]),
        ({"peer_certificate": __file__, "peer_key": __file__}, ["root-certificates"]),
        ({"partition_id": 2, "num_partitions": 2}, ["partition-id=2", "num-partitions=2"]),
        ({"partition_id": 2}, ["partition-id=2", "num-partitions"]),
        ({"num_partitions": 2}, ["num-partitions=2", "partition-id"]),
        ({"insecure": True, "root_certificates": __file__}, ["insecure", "root-certificates"]),
        ({"insecure": True, "auth_key": __file__}, ["auth-key", "insecure"]),
        ({"data": __file__, "dataset": "usps"}, ["data", "dataset=usps"]),
        ({"edge": "/tmp", "dataset": "usps"}, ["edge", "dataset=usps"]),
        ({"edge": "/tmp", "sector": 0}, ["edge", "sector=0"]),
        ({"poll_busy": 2, "poll_idle": 1}, ["poll-busy=2.0", "poll-idle=1.0"]),
        ({"max_rate": 5, "peer_address": "[::1]:0"}, ["max-rate=5.0", "peer-address"]),
        (
            {"quiet_hours": "08:00-18:00", "peer_address": "[::1]:0"},
            ["quiet-hours", "peer-address"],
        ),
        ({"files": {"a/b": "."}}, ["files", "'a/b'"]),
        ({"files": {"pets": "/nowhere"}}, ["files", "pets: /nowhere"]),
    ],
)
def test_settings_that_do_not_fit_each_other_are_named(
    given: dict[str, Any], names: list[str]
) -> None:
    with pytest.raises(NodeError) as error:
        load_settings(None, given)
    assert all(name in str(error.value) for name in names)


def test_no_setting_of_the_nodes_own_can_come_in_as_an_apps(tmp_path: Path) -> None:
    given = {
        "partition_id": 0,
        "num_partitions": 1,
        "sector": 0,
        "data": tmp_path,
        "root_certificates": __file__,
        "peer_address": "localhost:0",
        "peer_certificate": __file__,
        "peer_key": __file__,
    }
    keys = {*load_settings(None, given).app_config, "dataset"}
    assert len(keys) == 12
    for key in {*keys, "edge", "file.@pets", "holdout", "holdout-secret"}:
        with pytest.raises(NodeError, match=f"node-config: {key} is a setting"):
            load_settings(None, {"node_config": {key: "x", "site": "lab"}})


@pytest.mark.parametrize("content", ["- a\n- b\n", "a: [b\n", "just text"])
def test_a_file_that_holds_no_settings_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "node.yaml"
    file.write_text(content)
    with pytest.raises(NodeError, check=at("config", value=str(file))):
        load_settings(file, {})


def test_runs_name_the_owners_files_and_apps_find_them(tmp_path: Path) -> None:
    (tmp_path / "pets").mkdir()
    settings = load_settings(None, {"files": {"pets": tmp_path / "pets"}})
    assert settings.app_config["file.@pets"] == str(tmp_path / "pets")
    assert own_file(settings.app_config, "@pets") == str(tmp_path / "pets")
    assert own_file(settings.app_config, "noise") == "noise"
    with pytest.raises(SettingsError, match=r"no file called @cats .*`files` of the node's"):
        own_file(settings.app_config, "@cats")


def test_what_draws_the_held_out_samples_stays_and_is_the_nodes_own(tmp_path: Path) -> None:
    def secret(name: str, policy: Policy = HOSPITAL) -> Any:
        named = policy.model_copy(update={"classes": ["cat", "dog"]})
        settings = NodeSettings(policy=named, data=tmp_path, state_dir=tmp_path / name)
        return app_config(settings).get("holdout-secret")

    assert len(bytes.fromhex(secret("one"))) == 32
    assert secret("one") == secret("one") != secret("two")
    assert (tmp_path / "one" / "holdout-secret").stat().st_mode & 0o777 == 0o600
    assert secret("one", OPEN) is None, "then the run draws"


def test_a_runs_data_root_does_not_count_where_the_list_does(monkeypatch: Any) -> None:
    monkeypatch.delenv("FLWR_DISTILL_DATA_ROOT", raising=False)
    policy = HOSPITAL.model_copy(update={"fewest_of_a_class": 1})
    assert NodeSettings(policy=policy).app_config["data-root"] == "data"
    monkeypatch.setenv("FLWR_DISTILL_DATA_ROOT", "/data")
    assert NodeSettings(policy=policy).app_config["data-root"] == "/data"
    own = {"data-root": "/own"}
    assert NodeSettings(policy=policy, node_config=own).app_config["data-root"] == "/own"
    assert "data-root" not in NodeSettings().app_config
