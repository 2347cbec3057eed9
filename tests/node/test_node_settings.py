"""A node's settings: where they come from, and what is said of wrong ones."""

from pathlib import Path
from typing import Any

import pytest

from flwr_distill.client.session import own_file
from flwr_distill.node.policy import HOSPITAL, OPEN, STANDARD, Policy
from flwr_distill.node.settings import NodeError, NodeSettings, load_settings
from flwr_distill.node.supervisor import app_config
from flwr_distill.task.errors import SettingsError


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
    told = settings.app_config
    assert (told["dataset"], told["partition-id"]) == ("usps", 3)
    assert "num-partitions" not in told


@pytest.mark.parametrize("authority", ["nodes-ca.crt", None])
def test_apps_see_the_peer_address_and_what_proves_the_node(
    tmp_path: Path, authority: str | None
) -> None:
    names = ("ca.crt", "nodes-ca.crt", "node.crt", "node.key")
    files = {name: tmp_path / name for name in names}
    for file in files.values():
        file.touch()
    settings = load_settings(
        None,
        {
            "root_certificates": files["ca.crt"],
            "peer_address": "node7:9200",
            "peer_authority": files[authority] if authority else None,
            "peer_certificate": files["node.crt"],
            "peer_key": files["node.key"],
        },
    )
    told = {k: v for k, v in settings.app_config.items() if k.startswith("peer-")}
    assert told == {
        "peer-address": "node7:9200",
        "peer-authority": str(files[authority or "ca.crt"]),
        "peer-certificate": str(files["node.crt"]),
        "peer-key": str(files["node.key"]),
    }


@pytest.mark.parametrize("address", ["127.0.0.1:9200", "localhost:9200", "[::1]:9200"])
def test_an_address_on_loopback_needs_no_certificate(address: str) -> None:
    assert load_settings(None, {"peer_address": address}).app_config["peer-address"] == address


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"peer_address": "node7:9200"}, "peer-address=node7:9200 is reached from other machines"),
        ({"peer_address": "0.0.0.0:9200"}, "is reached from other machines"),
        ({"peer_address": "node7"}, "peer-address=node7"),
        ({"peer_key": __file__}, "peer-certificate and peer-key need each other"),
        ({"peer_authority": __file__}, "peer-authority needs peer-certificate"),
        ({"peer_certificate": __file__, "peer_key": __file__}, "needs root-certificates"),
        ({"node_config": {"peer-key": "x"}}, "peer-key is an option of its own"),
        ({"partition_id": 2, "num_partitions": 2}, "partition-id=2 must be below num-partitions=2"),
        ({"partition_id": 2}, "partition-id=2 needs num-partitions"),
        ({"num_partitions": 2}, "num-partitions=2 needs partition-id"),
        ({"device": "gpu"}, "device=gpu"),
        ({"data": "/nowhere/at/all"}, "/nowhere/at/all does not exist"),
        ({"insecure": True, "root_certificates": __file__}, "exclude each other"),
        ({"insecure": True, "auth_key": __file__}, "auth-key needs TLS"),
        ({"node_config": {"device": "cpu"}}, "device is an option of its own"),
        ({"node_config": {"sector": 1}}, "sector is an option of its own"),
        ({"node_config": {"dataset": "usps"}}, "dataset is an option of its own"),
        ({"data": __file__, "dataset": "usps"}, "data and dataset=usps exclude each other"),
        ({"edge": "/tmp", "dataset": "usps"}, "dataset=usps: an edge has none, its nodes below"),
        ({"edge": "/tmp", "sector": 0}, "sector=0: an edge has none, its nodes below have"),
        ({"node_config": {"edge": "x"}}, "edge is an option of its own"),
        ({"sector": -1}, "sector=-1"),
        ({"threads": 0}, "threads=0"),
        ({"release_after": 0}, "release-after=0"),
        ({"keep_runs": 0}, "keep-runs=0"),
        ({"poll_busy": 0}, "poll-busy=0"),
        ({"poll_idle": 601}, "poll-idle=601"),
        ({"poll_busy": 2, "poll_idle": 1}, "poll-busy=2.0 must not be above poll-idle=1.0"),
        ({"connect_timeout": -1}, "connect-timeout=-1"),
        ({"partition_id": -1, "num_partitions": 2}, "partition-id=-1"),
        ({"partition_id": 0, "num_partitions": 0}, "num-partitions=0"),
        ({"superlnk": "x"}, "superlnk=x: there is no such setting (there are name, superlink, "),
    ],
)
def test_a_wrong_setting_is_named_with_its_value_in_one_line(
    given: dict[str, Any], said: str
) -> None:
    with pytest.raises(NodeError) as error:
        load_settings(None, given)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


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
    told = {*load_settings(None, given).app_config, "dataset"}
    assert len(told) == 12
    for key in told:
        with pytest.raises(NodeError, match=f"{key} is an option of its own"):
            load_settings(None, {"node_config": {key: "x", "site": "lab"}})


@pytest.mark.parametrize("content", ["- a\n- b\n", "a: [b\n", "just text"])
def test_a_file_that_holds_no_settings_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "node.yaml"
    file.write_text(content)
    with pytest.raises(NodeError, match=r"node\.yaml"):
        load_settings(file, {})


def test_runs_name_the_owners_files_and_apps_find_them(tmp_path: Path) -> None:
    (tmp_path / "pets").mkdir()
    settings = load_settings(None, {"files": {"pets": tmp_path / "pets"}})
    assert settings.app_config["file.@pets"] == str(tmp_path / "pets")
    assert own_file(settings.app_config, "@pets") == str(tmp_path / "pets")
    assert own_file(settings.app_config, "noise") == "noise"
    with pytest.raises(SettingsError, match=r"no file called @cats .*`files` of the node's"):
        own_file(settings.app_config, "@cats")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"files": {"a/b": "."}}, "'a/b': a name has letters, digits"),
        ({"files": {"pets": "/nowhere"}}, "pets: /nowhere does not exist"),
        ({"node_config": {"file.@pets": "/"}}, "file.@pets is an option of its own"),
        ({"node_config": {"holdout": 0.9}}, "holdout is an option of its own"),
        ({"node_config": {"holdout-secret": "00"}}, "holdout-secret is an option of its own"),
    ],
)
def test_files_have_names_and_exist_and_nothing_else_sets_them(
    options: dict[str, Any], said: str
) -> None:
    with pytest.raises(NodeError, match=said):
        load_settings(None, options)


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
