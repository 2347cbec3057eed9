"""What a message asks of a node, as it is read: free of any policy, and believed in nothing."""

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
from flwr_distill.protocol.messages import ARRAYS, CONFIG, ROUTE
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
        values = {**_TRAIN_DEFAULTS, **table_of(self.run_config, "train")}
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
                inner = json_table(value) if isinstance(value, str) else value
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

    @property
    def virtual_epsilon(self) -> float:
        """Epsilon for which the app is to add noise to virtual data; 0 without noise.

        Only records count in which the phase declares ``dp-epsilon`` as such. In settings of
        training it is a budget, and in any other record nobody reads it.
        """
        request = self.phase.request if self.phase else None
        blocks = request.configs if request else {}
        noisy = {
            f"message {record}."
            for record, block in blocks.items()
            if "dp_epsilon" in block.model_fields and "dp_noise" not in block.model_fields
        }
        values = [s.value for s in self.said if s.name == "dp-epsilon" and s.where in noisy]
        return max((float(v) for v in values if isinstance(v, int | float)), default=0.0)

    @property
    def evaluates(self) -> bool:
        """Whether the message asks for an evaluation."""
        return self.message_type.partition(".")[0] == "evaluate"

    @property
    def resumes(self) -> int | None:
        """The run that this one resumes, if the message says so."""
        key = _RESUMES.get(self.message_type, "")
        run_id = str(self.said_by_record.get(CONFIG, {}).get(key, ""))
        return int(run_id) if _RUN_ID.fullmatch(run_id) else None

    def values(self, name: str) -> list[Setting]:
        """Settings of the run or the message that have this name."""
        return [setting for setting in self.settings if setting.name == name]


def forms_of(record: ArrayRecord) -> dict[str, Form]:
    """Shapes and types of a record's arrays, as they are said."""
    return {name: (tuple(array.shape), array.dtype) for name, array in record.items()}


def table_of(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A table of a run config; empty if there is none."""
    table = config.get(name, {})
    return table if isinstance(table, dict) else {}


def _settings_of(method: Method | None, config: Mapping[str, Any]) -> list[Setting]:
    """Settings of the run's method: defaults, its table, ``strategy-args``; as they are said."""
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
