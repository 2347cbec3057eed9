"""Presets of the papers against their facts, value by value.

A file is a paper's, by the name of its facts, and says where each stated value has to be::

    [presets]                       # each preset of the paper, and which of its cases it is
    cadis-mnist = { method = "CADIS", dataset = "MNIST", partition = "MC" }

    [hyperparameters]               # keys are those of the facts
    clients = "min-nodes"           # that setting has the facts' value
    optimizer = { setting = "train.optimizer", value = "sgd" }        # in our words
    lr = { setting = "train.lr", published = "lr" }                   # lost: the published code's
    gpu = { not_applicable = "speed alone" }

    [places.dataset.MNIST]          # what a case sets
    dataset = "mnist"
    model = "cadis-mnist"

    [chosen]                        # the method's other settings, and what the preset sets besides
    "cadis.most-say" = { value = 100.0, reason = "no cap" }

    [deviations]                    # where the preset differs from the paper
    "hfldd.bits" = { value = 4, reason = "..." }

A value of the facts that is a list allows each of its elements. One that is a table is that of the
preset's case (``{ DIGITS = 10, CIFAR10C = 1 }``). The same holds for ``value``. An entry with
``where = { dataset = "RETINA" }`` is for these cases alone; later entries win. What the facts call
"not stated" or "lost" needs no entry.

Settings in `OFF` have to be switched off in each preset: no paper has them.
"""

import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from flwr.common.config import flatten_dict
from pydantic import BaseModel, ConfigDict, model_validator

from benchmarks.in_process import Settings
from benchmarks.papers.facts import Facts, Value
from benchmarks.papers.tables import read_preset
from flwr_distill.protocol.registry import find_method
from flwr_distill.server.settings import RunSettings

OFF: Settings = {
    "aggregator": "",
    "defence": "off",
    "most-samples": 0.0,
    "norm-threshold": 0.0,
    "quorum": 0.0,
    "secure-sums": False,
    "start": "",
    "train.augment": "none",
    "train.dp-noise": 0.0,
    "train.holdout": 0.0,
    "train.kd-lambda": 0.0,
    "train.lr-schedule": "constant",
    "train.momentum": 0.0,
    "train.proximal-mu": 0.0,
    "cadis.main-cluster": 0.0,
    "cadis.rule": "mean",
    "fedhead.audit": False,
    "fedhead.least-classes": 0.0,
    "fedhead.least-gain": 0.0,
    "fedhead.rule": "mean",
    "fedlgd.dp-epsilon": 0.0,
    "fedlgd.formation": 1,
    "hfldd.average-last": 0.0,
    "hfldd.average-rounds": False,
    "hfldd.balanced": False,
    "hfldd.complete-clusters": False,
    "hfldd.dp-epsilon": 0.0,
    "hfldd.formation": 1,
    "hfldd.heads": "one",
    "hfldd.refresh-every": 0,
    "hfldd.rotate": False,
    "hfldd.votes": False,
}
"""What no paper has, switched off: screening, caps, turns, averaged weights, complete clusters."""
SILENT = ("not stated", "lost")
"""How the facts say that there is no value."""


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Stated(_Data):
    """Where a stated value has to be, or why it is nowhere."""

    setting: str = ""
    value: Any = None
    published: str = ""
    where: dict[str, Value] = {}
    not_applicable: str = ""

    @model_validator(mode="before")
    @classmethod
    def _from_setting(cls, entry: Any) -> Any:
        return {"setting": entry} if isinstance(entry, str) else entry


class Ours(_Data):
    """A value of a preset that is not the paper's, and why."""

    value: Value
    reason: str
    presets: tuple[str, ...] = ()
    """Empty for all."""


class Mapped(_Data):
    """What a paper's presets have to have."""

    presets: dict[str, dict[str, Value]]
    hyperparameters: dict[str, Stated]
    places: dict[str, dict[str, Settings]] = {}
    chosen: dict[str, Ours] = {}
    deviations: dict[str, Ours] = {}


@cache
def read_mappings() -> dict[str, Mapped]:
    """What presets have to have, by paper."""
    files = sorted(Path(__file__).parent.glob("*.toml"))
    return {file.stem: Mapped.model_validate(tomllib.loads(file.read_text())) for file in files}


def unmapped(mapped: Mapped, facts: Facts) -> list[str]:
    """Stated values that are neither mapped nor said to be nowhere, and entries without a fact."""
    stated = {key for key, value in facts.hyperparameters.items() if value not in SILENT}
    silent = facts.hyperparameters.keys() - stated
    known = mapped.hyperparameters.keys()
    return [
        *(f"{key}: stated by the paper, not mapped" for key in sorted(stated - known)),
        *(f"{key}: mapped, not in the facts" for key in sorted(known - stated - silent)),
    ]


def expected(mapped: Mapped, facts: Facts, name: str) -> dict[str, list[Any]]:
    """Values that each setting of a preset may have."""
    place = mapped.presets[name]
    tables = (_table(name), "train")
    values: dict[str, list[Any]] = {
        key: [off] for key, off in OFF.items() if key.partition(".")[0] in (*tables, key)
    }
    published = (facts.model_extra or {}).get("published_code", {})
    for key, entry in mapped.hyperparameters.items():
        if entry.not_applicable or any(place.get(k) != v for k, v in entry.where.items()):
            continue
        value = facts.hyperparameters[key] if entry.value is None else entry.value
        value = published[entry.published] if entry.published else value
        if isinstance(value, dict):
            value = next((value[case] for case in place.values() if case in value), SILENT[0])
        if value not in SILENT:
            values[entry.setting] = value if isinstance(value, list) else [value]
    for key, case in place.items():
        values |= {k: [v] for k, v in mapped.places[key][_text(case)].items()}
    return values


def problems(mapped: Mapped, facts: Facts, name: str, preset: Mapping[str, Value]) -> Iterator[str]:
    """What of a preset is neither the paper's nor explained."""
    full = flatten_dict(RunSettings.from_run_config(preset).model_dump(by_alias=True))
    required = expected(mapped, facts, name)
    for key, values in required.items():
        own = mapped.deviations.get(key)
        if full[key] in values:
            if own and _is_for(own, name):
                yield f"{key} = {full[key]!r} is the paper's: its deviation is stale"
        elif not own or not _is_for(own, name) or own.value != full[key]:
            yield f"{key} = {full[key]!r}, the paper has {values}"
    for key, own in mapped.chosen.items():
        if _is_for(own, name) and full.get(key) != own.value:
            yield f"{key} = {full.get(key)!r}, chosen was {own.value!r}"
    chosen = {key for key, own in mapped.chosen.items() if _is_for(own, name)}
    methods_own = {key for key in full if key.startswith(f"{_table(name)}.")}
    for key in (preset.keys() | methods_own) - required.keys() - chosen:
        yield f"{key} = {full[key]!r}: neither the paper's nor chosen with a reason"
    for key in mapped.deviations.keys() - required.keys():
        if _is_for(mapped.deviations[key], name):
            yield f"{key}: a deviation from nothing that the paper states"


@cache
def _table(preset: str) -> str:
    """Table of the settings of a preset's method."""
    method = find_method(str(read_preset(preset)["strategy"]))
    return method.table_name if method else ""


def _is_for(own: Ours, preset: str) -> bool:
    return not own.presets or preset in own.presets


def _text(case: Value) -> str:
    return f"{case:g}" if isinstance(case, (int, float)) else case
