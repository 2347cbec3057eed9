"""A node's policy: what is read from a file, put in words, and judged by it."""

import datetime
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from flwr.app import ConfigRecord, MetricRecord, RecordDict
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from PIL import Image

from flwr_distill.node.policy import HOSPITAL, OPEN, PRESETS, Policy, described, read_policy
from flwr_distill.node.replies import NodeIdentity, judge_reply
from flwr_distill.node.requests import MessageRequest
from flwr_distill.node.rules import judge_message, judge_spending
from flwr_distill.node.settings import NodeError, NodeSettings, load_settings
from flwr_distill.node.supervisor import _log_data
from flwr_distill.protocol.arrays import as_record
from flwr_distill.protocol.meeting import DESCRIBE_COLUMNS
from flwr_distill.strategies.fedlgd.method import TRAIN_VIRTUAL
from flwr_distill.task.errors import SettingsError
from tests.errors import at

HUB = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIDtqJ7zOtqQtYqOo0CpvDXNlMhV3HeJDpjrASKGLWdop"
NOBODY = NodeIdentity({}, [], b"", "")
NOON = datetime.datetime(2026, 1, 5, 12)
SETTINGS = ["dp-noise", "dp-delta", "dp-epsilon", "local-epochs", "start", "share-raw-data", "lr"]
VALUES = st.one_of(
    st.booleans(),
    st.integers(-(2**40), 2**40),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["noise", "real", 1.0, False, "[1"]),
)
CONFIGS = st.dictionaries(st.sampled_from(SETTINGS), VALUES, max_size=1)
PRIVATE = {"train.dp-noise": 1.0, "train.dp-delta": 1e-5, "train.local-epochs": 2}
RUNS = st.builds(
    lambda strategy, arguments, train, method: {
        **PRIVATE,
        "strategy": strategy,
        "strategy-args": arguments,
        **{f"train.{name}": value for name, value in train.items()},
        **{f"hfldd.{name}": value for name, value in method.items()},
    },
    st.sampled_from(["fedavg", "fedprox", "hfldd", "fedhead", "auto", "a.b:C", ""]),
    st.sampled_from(["", "{", "[]", '{"share_raw_data": true}']),
    CONFIGS,
    CONFIGS,
)


def request(
    run_config: dict[str, Any],
    message_type: str = "train",
    records: Mapping[str, Mapping[str, Any]] | None = None,
) -> MessageRequest:
    content = RecordDict({k: ConfigRecord(dict(v)) for k, v in (records or {}).items()})
    return MessageRequest.read(
        content, message_type=message_type, bundle="0" * 64, run_config=run_config
    )


def refusal(policy: Policy, run_config: dict[str, Any], *message: Any) -> str:
    """The rule and the reason by which a policy refuses a message; empty if it passes."""
    refused = judge_message(policy, request(run_config, *message), NOON)
    return "" if refused is None else f"{refused.rule}: {refused.reason}"


def matches(pattern: str, refused: str) -> bool:
    """Whether a refusal begins like a pattern; '' is of none."""
    return bool(re.match(pattern, refused)) if pattern else not refused


def of_file(folder: Path, text: str) -> Policy:
    file = folder / "policy.yaml"
    file.write_text(text)
    return read_policy(file)


def test_a_node_without_a_policy_keeps_its_samples() -> None:
    policy = NodeSettings().policy
    raw = {"strategy": "hfldd", "hfldd.share-raw-data": True}
    real = {"strategy": "hfldd", "hfldd.start": "real"}
    for run, rule in ((raw, "raw-data: "), (real, "starts: "), ({"strategy": "hfldd"}, "")):
        assert matches(rule, refusal(policy, run, "train.distill"))


def test_a_file_changes_the_preset_that_it_extends(tmp_path: Path) -> None:
    policy = of_file(tmp_path, "extends: hospital\nstrategies: any\nhours: 20:00-06:00\n")
    assert policy == HOSPITAL.model_copy(update={"strategies": None, "hours": "20:00-06:00"})
    assert of_file(tmp_path, "raw-data: never\n") == Policy(raw_data="never")


@pytest.mark.parametrize("name", PRESETS)
def test_what_a_preset_says_can_be_a_file(name: str, tmp_path: Path) -> None:
    assert read_policy(name) is PRESETS[name]
    values = PRESETS[name].model_dump(by_alias=True)
    text = {key: "any" if value is None else value for key, value in values.items()}
    assert of_file(tmp_path, yaml.safe_dump(text)) == PRESETS[name]
    as_json = PRESETS[name].model_dump_json(by_alias=True)  # as the supervisor hands it on
    assert Policy.model_validate_json(as_json, by_alias=True) == PRESETS[name]


@pytest.mark.parametrize(
    ("text", "where", "value"),
    [
        ("raw-dta: never", "raw-dta", None),
        ("raw-data: perhaps", "raw-data", "perhaps"),
        ("extends: clinic", "extends", "clinic"),
        ("most-epsilon: 3.0", "most-epsilon", 3.0),
        ("most-bytes-a-day: 5", "most-bytes-a-day", 5),
        ("most-disk: 5", "most-disk", 5),
        ("single-updates: never", "single-updates", "never"),
        ("sandbox: required", "sandbox", "required"),
        ("settings: listed", "settings", "listed"),
        ("replies: declared\nevaluation-epsilon: 0.1", "evaluation-epsilon", 0.1),
        ("hours: at night", "hours", "at night"),
        ("hours: 20:00-20:00", "hours", "20:00-20:00"),
        ("bundles: [abc]", "bundles.0", "abc"),
        ("publishers: {}", "publishers", {}),
        ("publishers: {hub: ssh-ed25519 AAAA}", "publishers.hub", "ssh-ed25519 AAAA"),
        ("publishers: {hub: ssh-rsa AAAA}", "publishers.hub", "ssh-rsa AAAA"),
        ("strategies: fedavg", "strategies", "fedavg"),
        ("direct-links: 1", "direct-links", 1),
        ("- a", "", None),
    ],
)
def test_a_wrong_file_is_one_line_that_names_the_key(
    text: str, where: str, value: object, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, check=at(where, value=value)) as error:
        of_file(tmp_path, text)
    assert error.value.source == f"policy {tmp_path / 'policy.yaml'}"
    assert "\n" not in str(error.value)


def test_of_an_unknown_key_the_nearest_is_named_and_of_a_wrong_file_its_place(
    tmp_path: Path,
) -> None:
    with pytest.raises(SettingsError) as error:
        of_file(tmp_path, "raw-dta: never")
    assert "raw-data" in error.value.remedy
    with pytest.raises(SettingsError, check=at(tmp_path / "policy.yaml")):
        of_file(tmp_path, "a: [")


def test_a_section_of_the_nodes_file_is_a_policy_too(tmp_path: Path) -> None:
    file = tmp_path / "node.yaml"
    file.write_text(
        f"insecure: true\ndata: {tmp_path}\n"
        "policy:\n  extends: hospital\n  most-epochs: 3\n  classes: [cat, 7]\n"
    )
    changes = {"most_epochs": 3, "classes": ["cat", "7"]}
    assert load_settings(file, {}).policy == HOSPITAL.model_copy(update=changes)
    assert load_settings(file, {"policy": "open"}).policy == OPEN
    file.write_text("policy: {raw-dta: never}\n")
    with pytest.raises(NodeError, check=at("policy: raw-dta")):
        load_settings(file, {})


def test_the_app_is_told_which_classes_are_too_small_and_the_node_has_data_to_count(
    tmp_path: Path,
) -> None:
    policy = Policy(fewest_of_a_class=5)
    assert NodeSettings(policy=policy, data=tmp_path).app_config["fewest-of-a-class"] == 5
    assert "fewest-of-a-class" not in NodeSettings(data=tmp_path).app_config
    assert NodeSettings(policy=HOSPITAL, edge=tmp_path).policy == HOSPITAL  # nodes below have data
    with pytest.raises(NodeError, match="fewest-of-a-class = 5 needs data"):
        load_settings(None, {"policy": {"fewest-of-a-class": 5}})


@pytest.mark.parametrize(
    "private", [{"extends": "hospital"}, {"least-noise": 1.0, "fewest-of-a-class": 5}]
)
def test_a_node_that_promises_differential_privacy_has_its_classes_named(
    private: dict[str, Any], tmp_path: Path
) -> None:
    """A count would take all samples of a class away with one of them."""
    with pytest.raises(NodeError, match="fewest-of-a-class"):
        load_settings(None, {"policy": private, "data": tmp_path})
    named = {**private, "classes": ["cat", "dog"]}
    config = load_settings(None, {"policy": named, "data": tmp_path}).app_config
    assert config["classes"] == "cat,dog"
    assert "fewest-of-a-class" not in config
    load_settings(None, {"policy": {**private, "fewest-of-a-class": 1}, "data": tmp_path})
    with pytest.raises(NodeError, match="classes needs data"):
        load_settings(None, {"policy": named})


def test_the_owner_hears_which_named_classes_have_too_few_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the node's own log: nothing that leaves depends on it."""
    for name, number in (("cat", 2), ("dog", 1)):
        (tmp_path / name).mkdir()
        for place in range(number):
            Image.new("L", (2, 2)).save(tmp_path / name / f"{place}.png")
    _log_data(tmp_path, Policy(fewest_of_a_class=2, classes=["cat", "dog", "fish"]))
    lines = capsys.readouterr().err.splitlines()[1:]
    few = [re.findall(r"class (\w+) has (\w+)", line) for line in lines]
    assert few == [[("dog", "1")], [("fish", "0")]]


@pytest.mark.parametrize("classes", [[], ["a,b"], [True], "cat"])
def test_classes_are_a_list_of_names_without_commas(classes: Any, tmp_path: Path) -> None:
    with pytest.raises(NodeError, match="classes"):
        load_settings(None, {"policy": {"classes": classes}, "data": tmp_path})


def test_words_tell_all_policies_apart() -> None:
    changes: dict[str, Any] = {k: value for k, value in HOSPITAL if value != getattr(OPEN, k)}
    changes |= {"message_types": [], "bundles": [], "most_bytes_a_day": 5, "hours": "1:00-2:00"}
    changes |= {"fewest_of_a_class": 9, "real_per_virtual": 50, "single_updates": "never"}
    changes |= {"publishers": {"hub": HUB}, "readable": ["/weights"], "most_disk": 5}
    changes |= {"classes": ["cat"], "counts_epsilon": 1.0, "statistics_epsilon": 1.0}
    assert changes.keys() == Policy.model_fields.keys()
    words = {" ".join(described(OPEN.model_copy(update={k: v}))) for k, v in changes.items()}
    # A delta without noise, and what may be read or kept without a sandbox, say nothing.
    assert len(words - {" ".join(described(OPEN))}) == len(changes) - 3


@pytest.mark.parametrize(
    ("hours", "works"),
    [("08:00-18:00", True), ("20:00-06:00", False), ("20:00-12:01", True), ("12:01-20:00", False)],
)
def test_hours_may_lie_around_midnight(hours: str, works: bool) -> None:
    assert Policy(hours=hours).works_at(NOON.time()) == works


def test_a_node_answers_the_messages_that_its_owner_lists_and_no_others() -> None:
    policy = Policy(message_types=["query.describe", "train"])
    assert not refusal(policy, {"strategy": "fedavg"})
    assert refusal(policy, {"strategy": "fedavg"}, "evaluate").startswith("message-types: 'eval")


def test_the_strategy_that_makes_the_first_model_is_judged_like_the_runs_own() -> None:
    run = {**PRIVATE, "strategy": "fedavg"}
    started = {**run, "start": "analytic"}
    declared, noisy = Policy(replies="declared"), Policy(least_noise=1.0)
    for policy, config, rule in (
        (declared, run, "replies: "),
        (declared, started, ""),
        (Policy(strategies=["fedavg"]), started, "strategies: "),
        (Policy(strategies=["fedavg", "analytic"]), started, ""),
        (noisy, started, ""),
        (noisy, {**started, "analytic.head": "lda"}, "least-noise: lda has no rule"),
    ):
        assert matches(rule, refusal(policy, config, "train.analytic_sums")), rule


PRIVATE_FEDLGD = {
    "strategy": "fedlgd",
    "train.dp-delta": 1e-5,
    "fedlgd.dp-epsilon": 2.0,
    "fedlgd.refine-steps": 0,
}
VIRTUAL_TRAINING = {"per-class": 1, "first-steps": 1, "dp-epsilon": 2.0}
NOISY = Policy(least_noise=1.0, most_epsilon=10.0)
"""Lets other messages than those that the strategy declares pass too, if they are private."""


def private(
    policy: Policy,
    run: dict[str, Any],
    values: dict[str, Any],
    message_type: str = TRAIN_VIRTUAL,
    record: str = "virtual",
) -> str:
    """The refusal of one of FedLGD's messages."""
    return refusal(policy, {**PRIVATE_FEDLGD, **run}, message_type, {record: values})


def test_means_of_columns_have_no_noise() -> None:
    """Whatever the app says that the run does."""
    run = PRIVATE | {"strategy": "fedavg"}
    assert refusal(HOSPITAL, run, DESCRIBE_COLUMNS).startswith("least-noise: ")
    assert not refusal(OPEN, run, DESCRIBE_COLUMNS)


@pytest.mark.parametrize("policy", [HOSPITAL, NOISY], ids=["hospital", "noisy"])
@pytest.mark.parametrize(
    ("run", "values", "reason"),
    [
        ({}, {}, ""),
        ({}, {"dp-epsilon": 10.0}, ""),
        ({"train.dp-delta": 1e-6}, {}, ""),
        ({"secure-sums": True}, {}, ""),
        ({"fedlgd.dp-epsilon": 0.0}, {}, "least-noise: nodes train on virtual data"),
        ({"fedlgd.refine-steps": 1}, {}, "least-noise: .*set refine-steps to 0"),
        ({"strategy-args": '{"dp_epsilon": 0.0}'}, {}, "least-noise: nodes train on virtual data"),
        ({"strategy-args": '{"dp_epsilon": 11}'}, {}, "most-epsilon: 10, and .* asks for 11"),
        ({"fedlgd.dp-epsilon": 11.0}, {}, "most-epsilon: 10, and .* asks for 11"),
        ({}, {"dp-epsilon": 11.0}, "most-epsilon: 10, and .* asks for 11"),
        ({}, {"dp-epsilon": math.inf}, "least-noise: .*finite"),
        ({}, {"dp-epsilon": math.nan}, "least-noise: "),
        ({}, {"dp-epsilon": 0.0}, "least-noise: .*asks for more than"),
        ({}, {"dp-epsilon": None}, "least-noise: .*asks for more than"),  # as a missing key
        ({}, {"refine-steps": 1}, "least-noise: .*asks for more than"),
        ({}, {"dp-epsilon": "much"}, "least-noise: "),
        ({}, {"per-class": None}, "least-noise: .*per-class"),
        ({"start": "analytic"}, {}, "(strategies|least-noise): "),
    ],
)
def test_a_strategy_that_keeps_an_epsilon_by_itself_passes_only_where_run_and_message_say_so(
    policy: Policy, run: dict[str, Any], values: dict[str, Any], reason: str
) -> None:
    given = {k: v for k, v in {**VIRTUAL_TRAINING, **values}.items() if v is not None}
    assert matches(reason, private(policy, run, given))


@pytest.mark.parametrize(
    "message",
    [
        *(("train",), ("train.distill",), ("train.feddm_distill",)),  # train on samples
        (TRAIN_VIRTUAL, "other"),  # is not what the app reads
    ],
)
def test_an_epsilon_of_fedlgds_own_covers_no_other_message_or_record(
    message: tuple[str, ...],
) -> None:
    assert private(NOISY, {}, VIRTUAL_TRAINING, *message).startswith("least-noise: ")


def test_private_virtual_data_need_an_epsilon_and_a_delta_that_the_owner_bounds() -> None:
    unbounded = Policy(least_noise=1.0)
    assert "must set most-epsilon" in private(unbounded, {}, VIRTUAL_TRAINING)
    strict = HOSPITAL.model_copy(update={"most_delta": 1e-6})
    assert private(strict, {}, VIRTUAL_TRAINING).startswith("most-delta: ")
    # So is the delta that a run does not name.
    run = {"strategy": "fedavg", "train.dp-noise": 1.0}
    assert refusal(strict, run).startswith("most-delta: ")


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(run=RUNS, config=CONFIGS, message_type=st.sampled_from(["train", "train.distill", "x.y"]))
def test_what_a_hospital_lets_pass_keeps_all_of_its_rules(
    run: dict[str, Any], config: dict[str, Any], message_type: str
) -> None:
    message = message_type, {"config": config}
    assert not refusal(OPEN, run, *message)
    try:
        refused = refusal(HOSPITAL, run, *message)
    except SettingsError:
        return  # the guard refuses what is unreadable
    event("refused" if refused else "passes")
    if refused:
        return
    assert run["strategy"] in (HOSPITAL.strategies or ())
    assert type(run["train.dp-noise"]) in (int, float)
    for name, value in {**run, **{f"message.{k}": v for k, v in config.items()}}.items():
        table, _, last = name.rpartition(".")
        if table in ("train", "message", run["strategy"]):
            assert last != "dp-noise" or value >= 1
            assert last != "dp-delta" or value <= 1e-5
            assert last != "local-epochs" or value <= 10
            assert last != "start" or value == "noise"
            assert last != "share-raw-data" or value is False


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(spent=st.floats(0, allow_infinity=True), most=st.floats(0.1, 100))
def test_no_epsilon_leaves_beyond_the_most(spent: float, most: float) -> None:
    assert judge_spending(OPEN, epsilon=spent, num_bytes=2**60, counted=False) is None
    policy = HOSPITAL.model_copy(update={"most_epsilon": most})
    assert (judge_spending(policy, epsilon=spent, num_bytes=0) is None) == (spent <= most)
    assert judge_spending(policy, epsilon=float("nan"), num_bytes=0)


MODEL = {"weight": np.zeros((3, 2), np.float32), "bias": np.zeros(3, np.float32)}


KNOWN = OPEN.model_copy(update={"bundles": ("0" * 64,)})


@pytest.mark.parametrize(
    ("run_config", "records"),
    [
        ({"dataset": "shutil:rmtree"}, {}),
        ({"model": "os:system"}, {}),
        ({"model": "timm:create_model"}, {}),
        ({"backbone.network": "my_pkg.mod:Net"}, {}),
        ({"hfldd.network": "torchvision:models"}, {}),
        ({"hfldd.distiller": "my_pkg.mod:distil"}, {}),
        ({"strategy-args": '{"distiller": "my_pkg.mod:distil"}'}, {}),
        ({}, {"config": {"distiller": "my_pkg.mod:distil"}}),
        ({}, {"config": {"settings": '{"network": "my_pkg.mod:Net"}'}}),
    ],
)
def test_who_runs_known_bundles_alone_imports_nothing_else(
    run_config: dict[str, Any], records: dict[str, Any]
) -> None:
    """Settings can name code, and a submitter may set them whatever the bundle."""
    run = {"strategy": "hfldd", **run_config}
    assert refusal(KNOWN, run, "train", records).startswith("bundles: runs no other code")
    assert not refusal(OPEN, run, "train", records)


@pytest.mark.parametrize("network", ["timm:resnet18", "torchvision:resnet18"])
def test_known_bundles_run_with_networks_of_packages_and_strategies_of_the_server(
    network: str,
) -> None:
    run = {"strategy": "my_pkg.mod:Strategy", "backbone.network": network}
    assert not refusal(KNOWN, run)


SUMS = {"strategy": "fedavg", "secure-sums": True}
IN_SUMS = Policy(replies="declared", single_updates="never")


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        ({"strategy": "fedavg"}, "secure-sums off"),
        ({"strategy": "fedavg", "secure-sums": "yes"}, "secure-sums off"),
        ({"strategy": "cadis", "secure-sums": True}, "'cadis' has no secure sums"),
        ({"strategy": "", "secure-sums": True}, "has no secure sums"),
        ({**SUMS, "start": "analytic"}, "start = 'analytic' has no secure sums"),
    ],
)
def test_a_node_that_sends_no_single_update_refuses_runs_without_sums(
    run: dict[str, Any], reason: str
) -> None:
    assert re.match(f"single-updates: .*{reason}", refusal(IN_SUMS, run))
    assert not refusal(IN_SUMS, SUMS)


@pytest.mark.parametrize(
    ("size", "kind", "metrics", "leaves"),
    [
        (14, np.uint64, {}, True),
        (14, np.uint64, {"dp-epsilon": 1.0, "dp-delta": 1e-5}, True),
        (15, np.uint64, {}, False),
        (14, np.float64, {}, False),
        (14, np.uint64, {"train-loss": 1.0}, False),
        (14, np.uint64, {"num-examples": 5}, False),
        (0, np.uint64, {}, False),
    ],
)
def test_what_leaves_in_a_secure_sum_is_masked_numbers_as_many_as_the_model_needs(
    size: int, kind: type, metrics: dict[str, float], leaves: bool
) -> None:
    masked = as_record({"masked": np.zeros(size, kind)}) if size else as_record(MODEL)
    name = "masked" if size else "arrays"
    reply = RecordDict({name: masked, "metrics": MetricRecord(metrics)})
    content = RecordDict({"arrays": as_record(MODEL), "config": ConfigRecord()})
    message = MessageRequest.read(content, message_type="train", bundle="0" * 64, run_config=SUMS)
    assert (judge_reply(IN_SUMS, message, reply, {}, NOBODY) is None) == leaves
