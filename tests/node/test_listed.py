"""The list of what a run may ask and of what leaves: it is complete, and each of its rows holds."""

import datetime
import json
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict

from flwr_distill.node.list_page import PAGE, page
from flwr_distill.node.listed import (
    BOUNDS,
    CODE,
    COUNTS,
    EXACT,
    METRIC_BOUNDS,
    METRICS,
    OFF,
    PATHS,
    SERVER,
    SETTINGS,
    bound_of,
)
from flwr_distill.node.policy import HOSPITAL, Policy
from flwr_distill.node.replies import NodeIdentity, judge_reply
from flwr_distill.node.requests import MessageRequest, Refusal
from flwr_distill.node.rules import judge_message, judge_request
from flwr_distill.protocol.method import Method, Phase
from flwr_distill.protocol.registry import all_methods, built_in_methods, phases_of
from flwr_distill.protocol.schema import Reply
from flwr_distill.server.app import main
from flwr_distill.server.settings_catalogue import settings_tables
from flwr_distill.task.settings import Block

NOON = datetime.datetime(2026, 1, 5, 12)
LISTED = Policy(replies="declared", settings="listed")
PRIVATE = {"strategy": "fedavg", "train.dp-noise": 1.0}
DEFAULTS = {s.key: s.default for t in settings_tables(built_in_methods()) for s in t.settings}
PHASES = {
    (name, phase.message_type): phase
    for name, method in built_in_methods().items()
    for secure_sums in (False, True)
    for phase in phases_of(method, secure_sums=secure_sums).values()
}


def keys_of(block: type[Block]) -> set[str]:
    return {field.alias or name for name, field in block.model_fields.items()}


def judged(
    content: RecordDict, message_type: str, config: dict[str, Any], policy: Policy = LISTED
) -> Refusal | None:
    message = MessageRequest.read(
        content, message_type=message_type, bundle="0" * 64, run_config=config
    )
    return judge_message(policy, message, NOON) or judge_request(policy, message, content)


def refused(config: dict[str, Any], policy: Policy = HOSPITAL, **message: Any) -> str:
    """The rule that refuses a message to train; empty if none does."""
    content = RecordDict({"config": ConfigRecord(message)})
    refusal = judged(content, "train", {**DEFAULTS, **PRIVATE, **config}, policy)
    return "" if refusal is None else f"{refusal.rule}: {refusal.reason}"


@pytest.mark.parametrize("key", DEFAULTS)
def test_each_setting_of_a_run_has_a_row(key: str) -> None:
    table, _, name = key.rpartition(".")
    bound = bound_of(table, name)
    assert bound in BOUNDS or bound in keys_of(Policy)


@pytest.mark.parametrize("phase", PHASES.values(), ids=lambda phase: phase.message_type)
def test_each_message_has_a_request_and_each_of_its_keys_a_row_as_a_node_reads_it(
    phase: Phase,
) -> None:
    assert phase.request is not None
    assert phase.handler or phase.message_type in ("train", "evaluate")
    for name, block in phase.request.configs.items():
        for key in keys_of(block):
            bound = bound_of("", key)
            assert bound != SERVER, f"{name}.{key}"
            assert bound in BOUNDS or bound in keys_of(Policy), f"{name}.{key}"


@pytest.mark.parametrize("phase", PHASES.values(), ids=lambda phase: phase.message_type)
def test_each_number_that_leaves_has_a_row(phase: Phase) -> None:
    for reply in phase.replies:
        assert keys_of(reply.metrics) <= METRICS.keys()
        if COUNTS in reply.configs:
            assert keys_of(reply.configs[COUNTS]) <= METRICS.keys()
        if reply.arrays:
            assert phase.leaves
    assert set(METRICS.values()) == METRIC_BOUNDS.keys()


def test_no_row_is_of_nothing() -> None:
    known = DEFAULTS.keys() | {key.rpartition(".")[2] for key in DEFAULTS}
    numbers = set()
    for phase in PHASES.values():
        assert phase.request
        known |= {key for block in phase.request.configs.values() for key in keys_of(block)}
        numbers |= {key for reply in phase.replies for key in keys_of(reply.metrics)}
        numbers |= {
            key
            for reply in phase.replies
            if COUNTS in reply.configs
            for key in keys_of(reply.configs[COUNTS])
        }
    assert not SETTINGS.keys() - known
    assert not METRICS.keys() - numbers


def test_a_run_with_all_defaults_and_noise_passes() -> None:
    assert not refused({})


WRONG: dict[str, Any] = {
    OFF: True,
    PATHS: "/data/ward-3",
    CODE: "my_pkg.mod:thing",
    "strategies": "fedaf",
    "starts": "real",
    "raw-data": True,
    "least-noise": 0.0,
    "most-delta": 0.1,
    "most-epochs": 11,
}
NOBODY = NodeIdentity({}, [], b"", "")
IN_USE = {"strategy": "hfldd", "hfldd.start": "noise", "hfldd.dp-epsilon": 2.0}
"""Settings of a method that a run does not have are not judged by their values, but for paths."""


@pytest.mark.parametrize(
    ("key", "bound"),
    [
        (key, bound)
        for key in DEFAULTS
        if (bound := bound_of(*key.rpartition(".")[::2])) in WRONG
        and (key.partition(".")[0] in ("train", "hfldd") or bound in (OFF, PATHS, CODE))
        and key not in ("train.dp-epsilon", "strategy-args")
    ],
)
def test_each_row_of_a_rule_holds(key: str, bound: str) -> None:
    run = {**IN_USE, "hfldd.balanced": False, key: WRONG[bound]}
    rule = {OFF: "settings", CODE: "settings"}.get(bound, bound)
    assert refused(run).startswith(f"{rule}: ")
    if key.startswith("hfldd."):
        name = key.removeprefix("hfldd.")
        arguments = json.dumps({name.replace("-", "_"): WRONG[bound]})
        assert refused({**IN_USE, "hfldd.balanced": False, "strategy-args": arguments}).startswith(
            f"{rule}: "
        )


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        ({"train.more": 1}, "settings: listed, and train.more = 1 is not on the list"),
        ({"more": 1}, "settings: listed, and more = 1 is not on the list"),
        ({"more.lr": 1}, "settings: listed, and more.lr = 1 is not on the list"),
        ({"hfldd.lr": 1}, "settings: listed, and hfldd.lr = 1 is not on the list"),
        ({"fedproto.weight": 2.0}, ""),  # of an installed package, whatever the run's method is
        ({"fedproto.lr": 1}, "settings: listed, and fedproto.lr = 1 is not on the list"),
        ({"strategy-args": '{"more": 1}'}, "settings: listed, and strategy-args.more = 1"),
        ({"train.lr": "fast"}, "settings: listed, and run config: train.lr"),
        ({"private.shape": "3x3"}, "settings: listed, and run config: private.shape"),
        ({"train.feature-layer": "/etc"}, "paths: named, and the run asks for train.feature-layer"),
        ({"data-root": "/data"}, ""),  # which the node's own comes before
        ({"hfldd.auxiliary": "@own"}, ""),
        ({"backbone.weights": "@own.st"}, ""),
        ({"backbone.weights": "noise"}, "paths: named"),
        ({"hfldd.auxiliary": "fashion-mnist"}, ""),
        ({"runs-dir": "/srv/runs", "aggregator-args": '{"more": "/x"}'}, ""),
    ],
)
def test_what_is_not_on_the_list_is_refused_by_its_name(config: dict[str, Any], rule: str) -> None:
    text = refused(config)
    assert text.startswith(rule) if rule else not text


@pytest.mark.parametrize(
    ("record", "values", "text"),
    [
        ("config", {"more": 1}, "more: is not a known key"),
        ("config", {"clipping_norm": 1.0}, "clipping-norm: is not a known key"),
        ("config", {"lr": -1.0}, "lr = -1.0"),
        ("model-contrast", {"mu": 1.0}, "a record 'model-contrast' is not on the list"),
        ("arrays.1", {}, "a record 'arrays.1' is not on the list"),
        ("pace", {"more": 1}, "message pace: more: is not a known key"),
    ],
)
def test_a_message_with_a_record_or_a_key_that_is_not_on_the_list_is_refused(
    record: str, values: dict[str, Any], text: str
) -> None:
    content = RecordDict({record: ConfigRecord(values)})
    refusal = judged(content, "train", {**DEFAULTS, **PRIVATE}, HOSPITAL)
    assert refusal is not None
    assert refusal.rule == "settings"
    assert text in refusal.reason


def test_a_message_without_a_request_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    phase = Phase("query.ask", "nodes answer", ())
    monkeypatch.setattr(
        "flwr_distill.node.requests.find_method", lambda name: Method("fedavg", phases=(phase,))
    )
    refusal = judged(RecordDict(), "query.ask", {**DEFAULTS, **PRIVATE})
    assert refusal is not None
    assert str(refusal).endswith("settings: listed, and no request 'query.ask' is on the list")


class Depths(Block):
    """Metrics of a plug-in."""

    samples_seen: int
    depth: float


@pytest.mark.parametrize(
    ("covered", "least_noise", "refused"),
    [
        (("samples-seen", "depth"), 1.0, ""),
        (("depth",), 1.0, "samples-seen"),
        ((), 1.0, "depth"),
        ((), 0.0, ""),
    ],
)
def test_metrics_of_a_plug_in_do_not_leave_with_differential_privacy_unless_it_covers_them(
    covered: tuple[str, ...], least_noise: float, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    phase = Phase("query.acme", "nodes answer", (Reply(metrics=Depths),), covered=covered)
    method = Method("acme", "acme:Acme", phases=(phase,), package="acme==1.0")
    monkeypatch.setattr("flwr_distill.node.requests.find_method", lambda name: method)
    message = MessageRequest.read(
        RecordDict(), message_type="query.acme", bundle="0" * 64, run_config={"strategy": "acme"}
    )
    reply = RecordDict({"metrics": MetricRecord({"samples-seen": 3, "depth": 0.5})})
    policy = LISTED.model_copy(update={"least_noise": least_noise})
    refusal = judge_reply(policy, message, reply, {}, NOBODY)
    assert (refusal is not None) == bool(refused)
    assert refusal is None or (refusal.rule == "replies" and f"'{refused}'" in refusal.detail)


def test_the_page_is_what_the_code_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "write it again: make settings"


@pytest.mark.parametrize("name", METRICS)
def test_exact_numbers_of_samples_do_not_leave_with_differential_privacy(name: str) -> None:
    for phase in {phase.message_type: phase for phase in PHASES.values()}.values():
        shown = {key for reply in phase.replies for key in keys_of(reply.metrics)}
        if name not in shown or METRICS[name] != EXACT or phase.epsilon:
            continue
        (method,) = [m for (m, t), p in PHASES.items() if p is phase and t == phase.message_type][
            :1
        ]
        message = MessageRequest.read(
            RecordDict(),
            message_type=phase.message_type,
            bundle="0" * 64,
            run_config={"strategy": method},
        )
        reply = RecordDict({"metrics": MetricRecord({"num-examples": 3, name: 0.5})})
        noisy = Policy(replies="declared", least_noise=1.0)
        refusal = judge_reply(noisy, message, reply, {}, NOBODY)
        assert refusal is not None
        assert refusal.rule == "replies"


@pytest.mark.parametrize(
    ("name", "more"),
    [
        pytest.param(
            name, {}, marks=() if name in (HOSPITAL.strategies or ()) else pytest.mark.slow
        )
        for name in all_methods()
        if name != "auto"
    ]
    + [
        ("analytic", {"analytic.personal": 0.5}),
        ("hfldd", {"hfldd.votes": True, "hfldd.rotate": False, "hfldd.complete-clusters": False}),
        ("hfldd", {"hfldd.refresh-every": 1}),
        ("fedhead", {"fedhead.rule": "agreement", "links": "relay"}),
        pytest.param("fedavg", {"secure-sums": True}, marks=pytest.mark.slow),
    ]
    + [
        pytest.param(name, {"secure-sums": True, **more}, marks=pytest.mark.matrix)
        for name, more in (
            ("fedlgd", {}),
            ("analytic", {}),
            ("hfldd", {"hfldd.complete-clusters": False, "hfldd.groups": 1}),
        )
    ],
)
def test_all_that_a_run_of_a_method_asks_is_on_the_list(
    name: str,
    more: dict[str, Any],
    client_grid: Any,
    tmp_path: Any,
    little_distillation: dict[str, Any],
) -> None:
    config = {
        **DEFAULTS,
        **little_distillation,
        **more,
        "strategy": name,
        "num-rounds": 2,
        "min-nodes": 4,
        "train.local-epochs": 1,
        "fraction-evaluate": 1.0,
        "runs-dir": str(tmp_path),
    }
    types: set[str] = set()

    def judge(node: int, message: Message) -> bool:
        kind = message.metadata.message_type
        refusal = judged(RecordDict(dict(message.content)), kind, config)
        assert refusal is None, f"{kind}: {refusal}"
        types.add(kind)
        return False

    main(client_grid(4, config, judge), Context(7, 1, {}, RecordDict(), config))
    own = {phase.message_type for phase in all_methods()[name].phases}
    assert types & own or not own - {"train"}
