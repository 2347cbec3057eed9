"""What a message asks of a node, as it reads: free of any policy, and trusted in nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from flwr.app import ArrayRecord, RecordDict

from flwr_distill.protocol.arguments import read_arguments
from flwr_distill.protocol.meeting import CONTINUE, DESCRIBE
from flwr_distill.protocol.messages import ARRAYS, CONFIG, PARCEL, ROUTE
from flwr_distill.protocol.method import Method, Phase
from flwr_distill.protocol.registry import find_method, phases_of
from flwr_distill.task.settings import TrainSettings, nested

Form = tuple[tuple[int, ...], str]
"""Shape and type of an array."""
_RESUMES = {DESCRIBE: "resumes", CONTINUE: "run-id"}
"""Keys that name the run that is resumed."""
_RUN_ID = re.compile("[0-9]{1,20}")
_TRAIN_DEFAULTS = TrainSettings().model_dump(by_alias=True)


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
class MessageRequest:
    """What a message asks of this node."""

    message_type: str
    bundle: str
    """SHA-256 of the app bundle that would answer."""
    run_config: Mapping[str, Any]
    """In nested tables."""
    records: Mapping[str, Mapping[str, Any]]
    """The message's config records by name, without bytes: parcels are large."""
    routes: Mapping[str, Mapping[str, Any]]
    """Routes of parcels to other nodes, by the name of the record."""
    model: Mapping[str, Form]
    """Forms of the arrays of the model that the run has sent, by name."""

    @classmethod
    def read(
        cls,
        content: RecordDict,
        *,
        message_type: str,
        bundle: str,
        run_config: Mapping[str, Any],
        model: Mapping[str, Form] | None = None,
    ) -> MessageRequest:
        """Read a message; `model` counts if the message has none, as of the run's last message."""
        configs = content.config_records
        sent = content.array_records.get(ARRAYS) or next(iter(content.array_records.values()), None)
        return cls(
            message_type=message_type,
            bundle=bundle,
            run_config=nested(run_config),
            records={
                name: {k: v for k, v in record.items() if not isinstance(v, bytes)}
                for name, record in configs.items()
            },
            routes={
                name: dict(record)
                for name, record in configs.items()
                if name.partition(".")[0] == ROUTE
            },
            model=(model or {}) if sent is None else forms_of(sent),
        )

    @cached_property
    def message_settings(self) -> tuple[Setting, ...]:
        """What the message itself sets."""
        return tuple(
            Setting(f"message {record}.", *item)
            for record, values in self.records.items()
            for item in values.items()
        )

    @cached_property
    def settings(self) -> tuple[Setting, ...]:
        """Settings of training, of the run's method, and of the message."""
        values = {**_TRAIN_DEFAULTS, **table_of(self.run_config, "train")}
        train = [Setting("train.", *item) for item in values.items()]
        return (*train, *_settings_of(self.method, self.run_config), *self.message_settings)

    @cached_property
    def all_settings(self) -> tuple[Setting, ...]:
        """All settings of run config and message, also within settings that are JSON."""
        settings, waiting = list[Setting](), [("", dict[str, Any](self.run_config))]
        waiting += [(s.where, {s.name: s.value}) for s in self.message_settings]
        while waiting:
            where, table = waiting.pop()
            for name, value in table.items():
                inner = json_table(value) if isinstance(value, str) else value
                if isinstance(inner, dict):
                    waiting.append((f"{where}{name}.", inner))
                else:
                    settings.append(Setting(where, name, value))
        return tuple(settings)

    @property
    def strategy(self) -> str:
        """The run's strategy; empty if it names none."""
        return str(self.run_config.get("strategy", ""))

    @cached_property
    def method(self) -> Method | None:
        """The strategy's declaration, if it has one here; the search reads all packages."""
        return find_method(self.strategy)

    @property
    def start(self) -> str:
        """The strategy that makes the run's first model; empty if that is random."""
        return str(self.run_config.get("start", ""))

    @cached_property
    def method_of_start(self) -> Method | None:
        """The declaration of that strategy."""
        return find_method(self.start) if self.start else None

    @property
    def phase(self) -> Phase | None:
        """The message's phase, if one of the run's strategies declares it."""
        secure_sums = bool(self.run_config.get("secure-sums"))
        phases = phases_of(self.method, self.method_of_start, secure_sums=secure_sums)
        return phases.get(self.message_type)

    @property
    def virtual_epsilon(self) -> float:
        """Epsilon for which the app is to add noise to virtual data; 0 without noise.

        Only where the phase declares ``dp-epsilon`` so: in training it is a budget, elsewhere
        nobody reads it.
        """
        request = self.phase.request if self.phase else None
        blocks = request.configs if request else {}
        values = [
            self.records.get(record, {}).get("dp-epsilon")
            for record, block in blocks.items()
            if "dp_epsilon" in block.model_fields and "dp_noise" not in block.model_fields
        ]
        return max((float(v) for v in values if isinstance(v, int | float)), default=0.0)

    @property
    def evaluates(self) -> bool:
        """Whether the message asks for an evaluation."""
        return self.message_type.partition(".")[0] == "evaluate"

    @property
    def asks_for_counts(self) -> bool:
        """Whether the run has nodes send counts of their held-out samples."""
        return table_of(self.run_config, "evaluate").get("counts") is True

    @property
    def is_private(self) -> bool:
        """Whether any setting of the run or of its method asks for differential privacy."""
        names = ("dp-noise", "dp-epsilon")
        return any(s.value for s in (*self.all_settings, *self.settings) if s.name in names)

    @property
    def resumes(self) -> int | None:
        """The run that this one resumes, if the message says so."""
        key = _RESUMES.get(self.message_type, "")
        run_id = str(self.records.get(CONFIG, {}).get(key, ""))
        return int(run_id) if _RUN_ID.fullmatch(run_id) else None

    def values(self, name: str) -> list[Setting]:
        """Settings of the run or the message that have this name."""
        return [setting for setting in self.settings if setting.name == name]

    def route_of(self, parcel: str) -> Mapping[str, Any]:
        """The unchecked route of a parcel, by its record's name; empty without one."""
        return self.routes.get(parcel.replace(PARCEL, ROUTE, 1), {})


def forms_of(record: ArrayRecord) -> dict[str, Form]:
    """Shapes and types of a record's arrays, as the record claims them."""
    return {name: (tuple(array.shape), array.dtype) for name, array in record.items()}


def table_of(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A table of a run config; empty if there is none."""
    table = config.get(name, {})
    return table if isinstance(table, dict) else {}


def _settings_of(method: Method | None, config: Mapping[str, Any]) -> list[Setting]:
    """Settings of the run's method, unchecked: defaults, its table, ``strategy-args``."""
    if method is None or method.settings is None:
        return []
    values = {**method.settings().model_dump(by_alias=True), **table_of(config, method.table_name)}
    arguments = read_arguments(str(config.get("strategy-args", "")), "strategy-args")
    values |= {name.replace("_", "-"): value for name, value in arguments.items()}
    return [Setting(f"{method.table_name}.", *item) for item in values.items()]


def json_table(text: str) -> object:
    """The JSON object in a text; None if it is none."""
    try:
        return json.loads(text) if text.lstrip().startswith("{") else None
    except (ValueError, RecursionError):
        return None
