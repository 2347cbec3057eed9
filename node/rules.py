"""What a policy says of a message that comes in: free functions; `node.replies` judges replies.

They read what the run and the server ask for, and do not trust it: what is unreadable is refused.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

from flwr.app import ConfigRecord, RecordDict

from flwr_distill.node.listed import LINKS, OFF, OWNER, PATHS, RANGE, SERVER, SETTINGS, bound_of
from flwr_distill.node.policy import Policy
from flwr_distill.node.requests import MessageRequest, Refusal, Setting, json_table, table_of
from flwr_distill.protocol.arguments import method_settings
from flwr_distill.protocol.meeting import DESCRIBE_COLUMNS
from flwr_distill.protocol.messages import PACE, STATISTICS
from flwr_distill.protocol.method import Method
from flwr_distill.protocol.registry import COMMON, all_methods
from flwr_distill.protocol.schema import Pace
from flwr_distill.protocol.statistics import ASK_STATISTICS
from flwr_distill.task.auxiliary_names import NAMED, NOISE, OWN_FILE, RESERVED
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.settings import TaskSettings, TrainSettings

_CODE = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.]*")
_NETWORK = "backbone.network"
_NO_CODE = ("timm:", "torchvision:")
"""Begin names of networks that are no code of the submitter's."""
_TASK_TABLES = {n for n, v in TaskSettings().model_dump(by_alias=True).items() if type(v) is dict}
EPSILON = "dp-epsilon"
"""Metric of a reply: what the run has spent on this node. Setting: what it may spend."""
MAX_NOISY_EPSILON = 10.0
"""Largest epsilon at which noise on virtual data counts, where the policy has no `most_epsilon`."""


def judge_message(
    policy: Policy, request: MessageRequest, now: datetime.datetime
) -> Refusal | None:
    """Why a policy refuses a message; None if it does not. `now` is by the node's clock."""
    if not policy.works_at(now.time()):
        return Refusal("hours", f"it is {now:%H:%M}, the node works at {policy.hours} (wait)")
    refusals = (rule(policy, request) for rule in _RULES)
    return next((refusal for refusal in refusals if refusal), None)


def judge_request(policy: Policy, request: MessageRequest, content: RecordDict) -> Refusal | None:
    """Why a policy refuses a message for the records and keys in it; None if it does not."""
    if policy.settings == "any":
        return None
    phase = request.phase
    if phase is None or phase.request is None:
        reason = f"listed, and no request {request.message_type!r:.60} is on the list"
        return Refusal("settings", reason)
    try:
        phase.request.check(RecordDict({k: v for k, v in content.items() if k != PACE}))
        Pace.checked(content.config_records.get(PACE, ConfigRecord()), f"message {PACE}")
    except ValueError as error:
        return Refusal("settings", f"listed, and in {request.message_type}: {error}")
    return None


def judge_spending(
    policy: Policy,
    *,
    epsilon: float,
    num_bytes: int,
    counted: bool = True,
    evaluations: int = 0,
) -> Refusal | None:
    """Why a policy refuses to let more leave; None if it does not.

    `epsilon` and `evaluations` are totals over all runs on the node's data set, `num_bytes` that of
    24 hours; each includes the reply at hand. `counted`: the reply states its cost, or has none.
    """
    if policy.most_evaluations is not None and evaluations > policy.most_evaluations:
        reason = f"{policy.most_evaluations:,} over all runs on this node's data, and all are spent"
        return Refusal("most-evaluations", f"{reason} (set fraction-evaluate to 0)")
    most, most_bytes = policy.most_epsilon, policy.most_bytes_a_day
    if most is not None and not counted:
        return Refusal("most-epsilon", "the reply does not say what epsilon it costs")
    if most is not None and not epsilon <= most:
        reason = f"{most:g} over all runs on this node's data, and this would make it {epsilon:.4g}"
        return Refusal("most-epsilon", f"{reason} (the node can take no further part)")
    if most_bytes is not None and num_bytes > most_bytes:
        reason = f"{most_bytes:,}, and this would make it {num_bytes:,} (wait)"
        return Refusal("most-bytes-a-day", reason)
    return None


def judge_bundle(policy: Policy, bundle: str) -> Refusal | None:
    """Why an app bundle with this SHA-256 is not opened; None if it may be."""
    if policy.bundles is None or bundle in policy.bundles:
        return None
    return Refusal(
        "bundles", f"the app bundle {bundle} is not among them (add it there if you trust it)"
    )


def _named_code(policy: Policy, request: MessageRequest) -> Refusal | None:
    if policy.bundles is None and policy.publishers is None and policy.settings == "any":
        return None
    named = [s for s in (*request.all_settings, *request.settings) if _names_code(s)]
    odd = [setting for setting in named if setting.name not in ("strategy", "start")]
    rule = "publishers" if policy.publishers is not None else "settings"
    rule = "bundles" if policy.bundles is not None else rule
    return _first(rule, "runs no other code", odd, "name what the bundle has itself")


def _listed(policy: Policy, request: MessageRequest) -> Refusal | None:
    if policy.settings == "any":
        return None
    for setting in request.all_settings:
        bound = _bound_of(request, setting)
        if bound is None:
            return Refusal("settings", f"listed, and {setting} is not on the list (remove it)")
        if bound == OFF and setting.value is not False:
            return _first("settings", "listed", [setting], "set it to false")
        if bound not in (SERVER, LINKS, OWNER) and _is_a_path(setting.value):
            return _first("paths", "named", [setting], "name no path")
    try:
        TaskSettings.checked(request.run_config, "run config")
    except SettingsError as error:
        return Refusal("settings", f"listed, and {error}")
    return None


def _paths(policy: Policy, request: MessageRequest) -> Refusal | None:
    if policy.paths == "any":
        return None
    odd = (
        s
        for s in request.all_settings
        if SETTINGS.get(s.name.replace("_", "-")) == PATHS and not _is_a_name(s)
    )
    remedy = "the node's owner can name a file, `files` of the node's settings, for @NAME"
    return _first("paths", "named", odd, remedy)


def _evaluations(policy: Policy, request: MessageRequest) -> Refusal | None:
    if policy.evaluation_epsilon is None or not request.evaluates:
        return None
    if request.phase is None or not request.phase.rates:
        what = f"{request.message_type!r:.60} gives more than the received model's accuracy"
        return Refusal("evaluation-epsilon", f"{policy.evaluation_epsilon:g}, and {what}")
    return None


def _strategies(policy: Policy, request: MessageRequest) -> Refusal | None:
    allowed = policy.strategies
    names = (request.start, request.strategy) if request.start else (request.strategy,)
    odd = [name for name in names if allowed is not None and name not in allowed]
    if allowed is None or not odd:
        return None
    reason = f"strategy = {odd[0]!r:.60} (take one of {', '.join(allowed)})"
    return Refusal("strategies", reason)


def _message_types(policy: Policy, request: MessageRequest) -> Refusal | None:
    allowed = policy.message_types
    if allowed is not None and request.message_type not in allowed:
        return Refusal("message-types", f"{request.message_type!r:.60} is not among them")
    if policy.replies == "declared" and request.phase is None:
        reason = (
            f"strategy = {request.strategy!r:.60} declares no message {request.message_type!r:.60}"
        )
        return Refusal("replies", reason)
    return None


def _statistics(policy: Policy, request: MessageRequest) -> Refusal | None:
    if request.message_type != ASK_STATISTICS:
        return None
    if policy.statistics == "never":
        return Refusal(STATISTICS, "never (its owner can set it to allowed)")
    if policy.statistics_epsilon is not None and request.run_config.get("dataset") != "private":
        return Refusal("statistics-epsilon", 'is for data of its own (set dataset to "private")')
    return None


def _raw_data(policy: Policy, request: MessageRequest) -> Refusal | None:
    if policy.raw_data == "allowed":
        return None
    odd = (s for s in request.values("share-raw-data") if s.value is not False)
    remedies = {
        "never": "set it to false",
        "ask": "set it to false, or have its owner allow it: flwr-distill policy allow RUN",
    }
    return _first("raw-data", policy.raw_data, odd, remedies[policy.raw_data])


def _starts(policy: Policy, request: MessageRequest) -> Refusal | None:
    if policy.starts is None:
        return None
    odd = (s for s in request.values("start") if s.value not in policy.starts)
    allowed = ", ".join(policy.starts)
    return _first("starts", allowed, odd, "take one of these")


def _noise(policy: Policy, request: MessageRequest) -> Refusal | None:
    least = policy.least_noise
    if not least or request.message_type == ASK_STATISTICS:  # which has noise of its own
        return None
    if request.message_type == DESCRIBE_COLUMNS:
        reason = f"{least:g}, and means of columns have none (state them in private.columns)"
        return Refusal("least-noise", reason)
    try:
        epsilons = _own_epsilons(request)
        uncovered = "" if epsilons else _uncovered(request)
    except SettingsError as error:
        epsilons, uncovered = [], str(error)
    if epsilons:
        return _own_privacy(policy, request, epsilons)
    if uncovered:
        return Refusal("least-noise", uncovered)
    noises = request.values("dp-noise")
    odd = [s for s in noises if not _number(s.value) >= least]
    training = {s.where for s in request.message_settings if s.name == "dp-noise"}
    if odd:
        return _first("least-noise", f"{least:g}", odd, f"set it to {least:g} or more")
    most = max_noisy_epsilon(policy)
    odd = [  # in a request to distil, 0 turns differential privacy off
        s
        for s in request.message_settings
        if s.name == EPSILON and s.where not in training and not 0 < _number(s.value) <= most
    ]
    return _first("least-noise", f"{least:g}", odd, f"set it above 0, and to {most:g} at most")


def _virtual_data(policy: Policy, request: MessageRequest) -> Refusal | None:
    """Refuse what the number of real images does not bound, and noise that protects nothing."""
    most = max_noisy_epsilon(policy)
    if policy.real_per_virtual == 1:
        return None
    odd = (s for s in request.values("distiller") if fits_labels(str(s.value)))
    refusal = _first("real-per-virtual", str(policy.real_per_virtual), odd, "take dm")
    if refusal or request.virtual_epsilon <= most:
        return refusal
    reason = (
        f"{policy.real_per_virtual}, and dp-epsilon = {request.virtual_epsilon:g} hides nothing"
    )
    return Refusal("real-per-virtual", f"{reason} (set it to {most:g} at most, or to 0)")


def fits_labels(distiller: str) -> bool:
    """Whether virtual data by a distiller show unusual records, among however many others.

    KIP fits every record's label, where the others match means (docs/privacy.md).
    """
    return distiller.startswith("kip")


def max_noisy_epsilon(policy: Policy) -> float:
    """Largest epsilon at which noise on virtual data counts as protection."""
    return MAX_NOISY_EPSILON if policy.most_epsilon is None else policy.most_epsilon


def _own_epsilons(request: MessageRequest) -> list[float]:
    """Epsilon by the method's own settings, and that of the message; empty without one."""
    method = request.method
    if method is None or request.start or not any(phase.epsilon for phase in method.phases):
        return []
    arguments = str(request.run_config.get("strategy-args", ""))
    table = table_of(request.run_config, method.table_name)
    settings = method_settings(method, table, arguments)
    epsilons = [method.epsilon(settings)]
    if not epsilons[0] > 0:
        return []
    phase = request.phase
    if phase is not None and phase.epsilon is not None:
        epsilons.append(phase.epsilon(settings, request.records))
    elif not (phase and phase.rates) and phase not in COMMON:
        epsilons.append(0.0)  # such as plain training, which would see the samples
    return epsilons


def _own_privacy(policy: Policy, request: MessageRequest, epsilons: list[float]) -> Refusal | None:
    """Judge a run whose method has privacy of its own, in place of noise in training."""
    most, name = policy.most_epsilon, f"strategy = {request.strategy!r:.60}"
    rule = "least-noise"
    if most is None:
        reason = f"{name} has an epsilon in place of it (the node's owner must set most-epsilon)"
    elif not all(epsilon > 0 for epsilon in epsilons):
        reason = f"the message {request.message_type!r:.60} asks for more than {name} makes private"
    elif not max(epsilons) <= most:
        rule = "most-epsilon"
        reason = f"{most:g}, and {name} asks for {max(epsilons):g} (lower it)"
    else:
        return None
    return Refusal(rule, reason)


def _delta(policy: Policy, request: MessageRequest) -> Refusal | None:
    if policy.most_delta >= 1 or not policy.least_noise:
        return None
    odd = (s for s in request.values("dp-delta") if not _number(s.value) <= policy.most_delta)
    return _first("most-delta", f"{policy.most_delta:g}", odd, "lower it")


def _epochs(policy: Policy, request: MessageRequest) -> Refusal | None:
    if policy.most_epochs is None:
        return None
    odd = (
        s
        for s in request.settings
        if s.name.endswith("epochs")
        and not s.name.startswith("server-")
        and not _number(s.value) <= policy.most_epochs
    )
    return _first("most-epochs", str(policy.most_epochs), odd, "lower it")


def _links(policy: Policy, request: MessageRequest) -> Refusal | None:
    if policy.direct_links:
        return None
    for route in request.routes.values():
        if route.get("link") != "relay" and route.get("address") != "":
            reason = f"false, and the message has a route to {route.get('address')!r:.60}"
            return Refusal("direct-links", f'{reason} (set links to "relay")')
    return None


def _single_updates(policy: Policy, request: MessageRequest) -> Refusal | None:
    if policy.single_updates == "allowed" or request.message_type == ASK_STATISTICS:
        return None
    strategy, method = f"strategy = {request.strategy!r:.60}", request.method
    if request.run_config.get("secure-sums") is not True:
        reason = "the run has secure-sums off (set it to true)"
    elif request.start:
        reason = f"start = {request.start!r:.60} has no secure sums (leave it empty)"
    elif method is None or not method.summed:
        reason = f"{strategy} has no secure sums (take fedavg)"
    elif request.phase is None:
        reason = f"{request.message_type!r:.60} of {strategy} has no masks"
    else:
        return None
    return Refusal("single-updates", f"never, and {reason}")


_RULES: tuple[Callable[[Policy, MessageRequest], Refusal | None], ...] = (
    _named_code,
    _strategies,
    _single_updates,
    _message_types,
    _paths,
    _raw_data,
    _starts,
    _noise,
    _virtual_data,
    _delta,
    _epochs,
    _links,
    _evaluations,
    _statistics,
    _listed,
)


def _bound_of(request: MessageRequest, setting: Setting) -> str | None:
    table, _, inner = setting.where.rstrip(".").partition(".")
    name = setting.name
    if table == "aggregator-args":
        return SERVER
    if table.startswith("message "):
        if not inner or inner.isdecimal():  # a key of the record, which its request declares
            return bound_of("", name) or RANGE
        # A setting within one that is JSON.
        own_table = request.method.table_name if request.method else ""
        own_names = _settings_by_table().get(own_table, ())
        return bound_of("", name) or (RANGE if name in own_names else None)
    if table == "strategy-args":
        table, name = request.method.table_name if request.method else "", name.replace("_", "-")
    own = _settings_by_table()
    if inner or (table in own and name not in own[table]):
        return None
    if table not in own and table not in ("", *_TASK_TABLES):
        return None
    return bound_of(table, name) or (RANGE if name in own.get(table, ()) else None)


@cache
def _settings_by_table() -> dict[str, set[str]]:
    tables: dict[str, set[str]] = {}
    for method in all_methods().values():
        if method.settings is not None:
            names = method.settings().model_dump(by_alias=True)
            tables.setdefault(method.table_name, set()).update(names)
    return tables


def _is_a_name(setting: Setting) -> bool:
    public = (NOISE, RESERVED, *NAMED) if setting.name == "auxiliary" else ()
    value = setting.value
    return value in ("", *public) or (isinstance(value, str) and bool(OWN_FILE.fullmatch(value)))


def _is_a_path(value: object) -> bool:
    return isinstance(value, str) and any(c in value for c in "/\\") and not json_table(value)


def _first(rule: str, allowed: str, odd: Iterable[Setting], remedy: str) -> Refusal | None:
    setting = next(iter(odd), None)
    if setting is None:
        return None
    return Refusal(rule, f"{allowed}, and the run asks for {setting} ({remedy})")


def _uncovered(request: MessageRequest) -> str:
    """What differential privacy would not cover in the run, with the remedy; '' if nothing."""
    arguments = str(request.run_config.get("strategy-args", ""))
    of_start = _uncovered_of(request.method_of_start, request.run_config, "")
    return of_start or _uncovered_of(request.method, request.run_config, arguments)


def _uncovered_of(method: Method | None, config: Mapping[str, Any], arguments: str) -> str:
    if method is None:
        return ""
    if method.unprotected is None:
        declares = "does not declare what differential privacy covers"
        return f"{method.name} {declares}" if method.phases or method.terms else ""
    settings = method_settings(method, table_of(config, method.table_name), arguments)
    return method.unprotected(
        settings, TrainSettings.checked(table_of(config, "train"), "run config")
    )


def _names_code(setting: Setting) -> bool:
    """Whether a setting names code that is to be imported, as ``module:attribute``."""
    value = setting.value
    if setting.where + setting.name == _NETWORK and str(value).startswith(_NO_CODE):
        return False
    parts = value if isinstance(value, list) else [value]
    return any(isinstance(part, str) and _CODE.fullmatch(part.strip()) for part in parts)


def _number(value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else float("nan")  # type: ignore[arg-type]
