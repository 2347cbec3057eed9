"""What a policy says of a message that comes in: free functions.

They read what the run and the server ask for, and do not believe it: what cannot be read is
refused. Replies are judged in `node.replies`.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from flwr.app import ArrayRecord, RecordDict

from node.policy import Policy
from protocol.arguments import method_settings, read_arguments
from protocol.messages import ARRAYS, ROUTE
from protocol.method import EVALUATE_PHASE, Method, Phase
from protocol.registry import COMMON, find_method, phases_of
from task.settings import SettingsError, TrainSettings, nested

Form = tuple[tuple[int, ...], str]
"""Shape and type of an array."""
_CODE = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.]*")
_NO_CODE = "torchvision:"
"""Begins names of models that are no code of the submitter's."""
_TRAIN_DEFAULTS = TrainSettings().model_dump(by_alias=True)
EPSILON = "dp-epsilon"
"""Metric of a reply: what the run has spent on this node. Setting: what it may spend."""


@dataclass(frozen=True)
class Refusal:
    """The rule of a policy that refuses something, and why, with the remedy.

    The detail is for the node's own log: it quotes the app, which must not send in this way either.
    """

    rule: str
    reason: str
    detail: str = ""

    def __str__(self) -> str:
        return f"the node's policy refuses it: {self.rule}: {self.reason}"


@dataclass(frozen=True)
class Setting:
    """A setting of the run (``train.``, ``hfldd.``) or of a message's record."""

    where: str
    name: str
    value: object

    def __str__(self) -> str:
        return f"{self.where}{self.name} = {self.value!r:.60}"


@dataclass(frozen=True)
class Asked:
    """What a message asks of this node.

    Parameters
    ----------
    message_type : str
        Flower's.
    bundle : str
        SHA-256 of the app bundle that would answer.
    run_config : Mapping[str, object]
        In nested tables.
    said : tuple of Setting
        What the message itself says.
    routes : Mapping[str, Mapping[str, object]]
        Routes of parcels to other nodes, by the name of the record.
    model : Mapping[str, Form]
        Shapes and types of the arrays of the model that was sent, by name.
    """

    message_type: str
    bundle: str
    run_config: Mapping[str, Any]
    said: tuple[Setting, ...]
    routes: Mapping[str, Mapping[str, Any]]
    model: Mapping[str, Form]

    @classmethod
    def by(
        cls,
        content: RecordDict,
        *,
        message_type: str,
        bundle: str,
        run_config: Mapping[str, Any],
        model: Mapping[str, Form] | None = None,
    ) -> Asked:
        """Read a message.

        Parameters
        ----------
        model : Mapping[str, Form], optional (default: None)
            That which the run's messages before have brought, if this one brings none.

        Raises
        ------
        SettingsError
            If the run config cannot be read.
        """
        records = content.config_records
        said = [
            Setting(f"message {record}.", name, value)
            for record, values in records.items()
            for name, value in values.items()
            if not isinstance(value, bytes)  # parcels are large
        ]
        sent = content.array_records.get(ARRAYS) or next(iter(content.array_records.values()), None)
        if sent is not None:
            model = forms_of(sent)
        return cls(
            message_type=message_type,
            bundle=bundle,
            run_config=nested(run_config),
            said=tuple(said),
            routes={
                name: dict(record)
                for name, record in records.items()
                if name.partition(".")[0] == ROUTE
            },
            model=model or {},
        )

    @cached_property
    def settings(self) -> tuple[Setting, ...]:
        """Settings of training, of the run's method, and of the message."""
        values = {**_TRAIN_DEFAULTS, **_table(self.run_config, "train")}
        train = [Setting("train.", *item) for item in values.items()]
        return (*train, *_settings_of(self.method, self.run_config), *self.said)

    @property
    def said_by_record(self) -> dict[str, dict[str, object]]:
        """What the message itself says, by the name of its record and the key."""
        records: dict[str, dict[str, object]] = {}
        for setting in self.said:
            name = setting.where.removeprefix("message ").removesuffix(".")
            records.setdefault(name, {})[setting.name] = setting.value
        return records

    @cached_property
    def all_settings(self) -> tuple[Setting, ...]:
        """All settings of the run config, and those in settings that are JSON."""
        found, waiting = list[Setting](), [("", dict[str, Any](self.run_config))]
        waiting += [(s.where, {s.name: s.value}) for s in self.said]
        while waiting:
            where, table = waiting.pop()
            for name, value in table.items():
                inner = _json_table(value) if isinstance(value, str) else value
                if isinstance(inner, dict):
                    waiting.append((f"{where}{name}.", inner))
                else:
                    found.append(Setting(where, name, value))
        return tuple(found)

    @property
    def strategy(self) -> str:
        """The run's strategy; empty if it names none."""
        return str(self.run_config.get("strategy", ""))

    @cached_property
    def method(self) -> Method | None:
        """The strategy's declaration, if it has one here; to look for it reads all packages."""
        return find_method(self.strategy)

    @property
    def start(self) -> str:
        """The strategy that makes the run's first model; empty if that is random."""
        return str(self.run_config.get("start", ""))

    @cached_property
    def method_of_start(self) -> Method | None:
        """The method of that strategy; None if there is none."""
        return find_method(self.start) if self.start else None

    @property
    def methods(self) -> tuple[str, ...]:
        """The run's strategies: the one that makes its first model, if any, and its own."""
        return (self.start, self.strategy) if self.start else (self.strategy,)

    @property
    def phase(self) -> Phase | None:
        """The phase of the run's strategies that the message is of, if they declare one."""
        secure_sums = bool(self.run_config.get("secure-sums"))
        phases = phases_of(self.method, self.method_of_start, secure_sums=secure_sums)
        return phases.get(self.message_type)

    def values(self, name: str) -> list[Setting]:
        """Settings of the run or the message that have this name."""
        return [setting for setting in self.settings if setting.name == name]


def judge_message(policy: Policy, asked: Asked, now: datetime.datetime) -> Refusal | None:
    """Why a policy refuses a message; None if it does not.

    Parameters
    ----------
    now : datetime
        By the node's clock.
    """
    if not policy.works_at(now.time()):
        return Refusal("hours", f"it is {now:%H:%M}, the node works at {policy.hours} (wait)")
    refusals = (rule(policy, asked) for rule in _RULES)
    return next((refusal for refusal in refusals if refusal), None)


def judge_spending(
    policy: Policy, *, epsilon: float, num_bytes: int, counted: bool = True
) -> Refusal | None:
    """Why a policy refuses to let more leave; None if it does not.

    Parameters
    ----------
    epsilon : float
        What has left over all runs on the node's data set, with the reply at hand.
    num_bytes : int
        What has left in the last 24 hours, with the reply at hand.
    counted : bool (default: True)
        Whether the reply says what it costs, or costs nothing.
    """
    most, most_bytes = policy.most_epsilon, policy.most_bytes_a_day
    if most is not None and not counted:
        return Refusal("most-epsilon", "the reply does not say what epsilon it costs")
    if most is not None and not epsilon <= most:
        return Refusal(
            "most-epsilon",
            f"{most:g} over all runs on this node's data, and this would make it {epsilon:.4g} "
            "(the node can take no further part)",
        )
    if most_bytes is not None and num_bytes > most_bytes:
        return Refusal(
            "most-bytes-a-day", f"{most_bytes:,}, and this would make it {num_bytes:,} (wait)"
        )
    return None


def judge_bundle(policy: Policy, bundle: str) -> Refusal | None:
    """Why an app bundle with this SHA-256 is not opened; None if it may be."""
    if policy.bundles is None or bundle in policy.bundles:
        return None
    return Refusal("bundles", f"the app bundle {bundle} is not among them")


def _bundles(policy: Policy, asked: Asked) -> Refusal | None:
    return judge_bundle(policy, asked.bundle)


def _named_code(policy: Policy, asked: Asked) -> Refusal | None:
    if policy.bundles is None and policy.publishers is None:
        return None
    named = [s for s in (*asked.all_settings, *asked.settings) if _code_in(s.value)]
    odd = [setting for setting in named if setting.name not in ("strategy", "start")]
    rule = "publishers" if policy.bundles is None else "bundles"
    return _first(rule, "runs no other code", odd, "name what the bundle has itself")


def _strategies(policy: Policy, asked: Asked) -> Refusal | None:
    allowed = policy.strategies
    odd = [name for name in asked.methods if allowed is not None and name not in allowed]
    if allowed is None or not odd:
        return None
    reason = f"strategy = {odd[0]!r:.60} (take one of {', '.join(allowed)})"
    return Refusal("strategies", reason)


def _message_types(policy: Policy, asked: Asked) -> Refusal | None:
    allowed = policy.message_types
    if allowed is not None and asked.message_type not in allowed:
        return Refusal("message-types", f"{asked.message_type!r:.60} is not among them")
    if policy.replies == "declared" and asked.phase is None:
        reason = f"strategy = {asked.strategy!r:.60} declares no message {asked.message_type!r:.60}"
        return Refusal("replies", reason)
    return None


def _raw_data(policy: Policy, asked: Asked) -> Refusal | None:
    if policy.raw_data == "allowed":
        return None
    odd = (s for s in asked.values("share-raw-data") if s.value is not False)
    remedies = {
        "never": "set it to false",
        "ask": "set it to false, or have its owner allow it: flwr-distill policy allow RUN",
    }
    return _first("raw-data", policy.raw_data, odd, remedies[policy.raw_data])


def _starts(policy: Policy, asked: Asked) -> Refusal | None:
    if policy.starts is None:
        return None
    odd = (s for s in asked.values("start") if s.value not in policy.starts)
    allowed = ", ".join(policy.starts)
    return _first("starts", allowed, odd, "take one of these")


def _noise(policy: Policy, asked: Asked) -> Refusal | None:
    least = policy.least_noise
    if not least:
        return None
    try:
        epsilons = _own_epsilons(asked)
        uncovered = "" if epsilons else _uncovered(asked)
    except SettingsError as error:
        epsilons, uncovered = [], str(error)
    if epsilons:
        return _own_privacy(policy, asked, epsilons)
    if uncovered:
        return Refusal("least-noise", uncovered)
    noises = asked.values("dp-noise")
    odd = [s for s in noises if not _number(s.value) >= least]
    training = {s.where for s in asked.said if s.name == "dp-noise"}
    odd += [  # in a request to distil, 0 turns differential privacy off
        s
        for s in asked.said
        if s.name == EPSILON and s.where not in training and not _number(s.value) > 0
    ]
    return _first("least-noise", f"{least:g}", odd, f"set it to {least:g} or more")


def _own_epsilons(asked: Asked) -> list[float]:
    """Epsilon by the method's own settings, and that of the message; empty if it has none."""
    method = asked.method
    if method is None or method.own_privacy is None or asked.start:
        return []
    arguments = str(asked.run_config.get("strategy-args", ""))
    table = _table(asked.run_config, method.table_name)
    epsilons = [method.own_privacy(method_settings(method, table, arguments))]
    if not epsilons[0] > 0:
        return []
    phase = asked.phase
    if phase is not None and phase.own_privacy is not None:
        epsilons.append(phase.own_privacy(asked.said_by_record))
    elif phase is not EVALUATE_PHASE and phase not in COMMON:
        epsilons.append(0.0)  # such as plain training, which would see the samples
    return epsilons


def _own_privacy(policy: Policy, asked: Asked, epsilons: list[float]) -> Refusal | None:
    """Judge a run whose method has privacy of its own, in place of noise in training."""
    most, name = policy.most_epsilon, f"strategy = {asked.strategy!r:.60}"
    if most is None:
        reason = f"{name} has an epsilon in place of it (the node's owner must set most-epsilon)"
        return Refusal("least-noise", reason)
    if not all(epsilon > 0 for epsilon in epsilons):
        reason = f"the message {asked.message_type!r:.60} asks for more than {name} makes private"
        return Refusal("least-noise", reason)
    if not max(epsilons) <= most:
        reason = f"{most:g}, and {name} asks for {max(epsilons):g} (lower it)"
        return Refusal("most-epsilon", reason)
    return None


def _delta(policy: Policy, asked: Asked) -> Refusal | None:
    if policy.most_delta >= 1 or not policy.least_noise:
        return None
    odd = (s for s in asked.values("dp-delta") if not _number(s.value) <= policy.most_delta)
    return _first("most-delta", f"{policy.most_delta:g}", odd, "lower it")


def _epochs(policy: Policy, asked: Asked) -> Refusal | None:
    if policy.most_epochs is None:
        return None
    odd = (
        s
        for s in asked.settings
        if s.name.endswith("epochs")
        and not s.name.startswith("server-")
        and not _number(s.value) <= policy.most_epochs
    )
    return _first("most-epochs", str(policy.most_epochs), odd, "lower it")


def _links(policy: Policy, asked: Asked) -> Refusal | None:
    if policy.direct_links:
        return None
    for route in asked.routes.values():
        if route.get("link") != "relay" and route.get("address") != "":
            reason = f"false, and the message has a route to {route.get('address')!r:.60}"
            return Refusal("direct-links", f'{reason} (set links to "relay")')
    return None


def _single_updates(policy: Policy, asked: Asked) -> Refusal | None:
    if policy.single_updates == "allowed":
        return None
    if asked.run_config.get("secure-sums") is not True:
        return Refusal("single-updates", "never, and the run has secure-sums off (set it to true)")
    if asked.start:
        reason = f"never, and start = {asked.start!r:.60} has no secure sums (leave it empty)"
        return Refusal("single-updates", reason)
    if asked.method is None or not asked.method.summed:
        reason = f"never, and strategy = {asked.strategy!r:.60} has no secure sums (take fedavg)"
        return Refusal("single-updates", reason)
    return None


_RULES: tuple[Callable[[Policy, Asked], Refusal | None], ...] = (
    _bundles,
    _named_code,
    _strategies,
    _message_types,
    _raw_data,
    _starts,
    _noise,
    _delta,
    _epochs,
    _links,
    _single_updates,
)


def _first(rule: str, allowed: str, odd: Iterable[Setting], remedy: str) -> Refusal | None:
    setting = next(iter(odd), None)
    if setting is None:
        return None
    return Refusal(rule, f"{allowed}, and the run asks for {setting} ({remedy})")


def _settings_of(method: Method | None, config: Mapping[str, Any]) -> list[Setting]:
    """Settings of the run's method: defaults, its table, ``strategy-args``; as they are said."""
    if method is None or method.settings is None:
        return []
    values = {**method.settings().model_dump(by_alias=True), **_table(config, method.table_name)}
    arguments = read_arguments(str(config.get("strategy-args", "")), "strategy-args")
    values |= {name.replace("_", "-"): value for name, value in arguments.items()}
    return [Setting(f"{method.table_name}.", *item) for item in values.items()]


def _uncovered(asked: Asked) -> str:
    """What differential privacy would not cover in the run, with the remedy; empty if nothing."""
    arguments = str(asked.run_config.get("strategy-args", ""))
    of_start = _uncovered_of(asked.method_of_start, asked.run_config, "")
    return of_start or _uncovered_of(asked.method, asked.run_config, arguments)


def _uncovered_of(method: Method | None, config: Mapping[str, Any], arguments: str) -> str:
    if method is None:
        return ""
    if method.unprotected is None:
        if method.phases or method.terms:
            return f"{method.name} does not declare what differential privacy covers"
        return ""
    settings = method_settings(method, _table(config, method.table_name), arguments)
    train = TrainSettings.checked(_table(config, "train"), "run config")
    return method.unprotected(settings, train)


def forms_of(record: ArrayRecord) -> dict[str, Form]:
    """Shapes and types of a record's arrays, as they are said."""
    return {name: (tuple(array.shape), array.dtype) for name, array in record.items()}


def _table(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    table = config.get(name, {})
    return table if isinstance(table, dict) else {}


def _json_table(text: str) -> object:
    try:
        return json.loads(text) if text.lstrip().startswith("{") else None
    except (ValueError, RecursionError):
        return None


def _code_in(value: object) -> bool:
    """Whether a setting names code that is to be imported, as ``module:attribute``."""
    parts = value if isinstance(value, list) else [value]
    return any(
        isinstance(part, str) and _CODE.fullmatch(part.strip()) and not part.startswith(_NO_CODE)
        for part in parts
    )


def _number(value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else float("nan")  # type: ignore[arg-type]
