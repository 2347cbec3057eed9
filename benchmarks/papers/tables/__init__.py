"""How the papers' tables are run: what each printed cell changes of a preset.

A file is a paper's (``hfldd.toml``) and has ``[[tables]]``. A table names what it reproduces and
how it is run. Its rows are the paper's own cells, so no number of a paper stands here::

    [[tables]]
    facts = "VI"                     # table of benchmarks/papers/facts/hfldd.toml, or "figure 5"
    preset = "hfldd-cifar10"
    metric = "last"                  # what the paper prints: last, best, last-ten, rounds, ...
    settings = { seed = 0 }          # what all cells change of the preset
    small = { num-rounds = 10 }      # what --small changes besides, for all rows alike
    small_reason = "the paper's nodes, skew and network; fewer rounds"

    [tables.axes]                    # for each key of a cell: what its values change
    C = "partition.classes"          # the value is that setting's

    [tables.axes.method]
    HFLDD = {}
    FedAvg = { strategy = "fedavg" }

    [tables.axes.model]
    MobileNetV2 = { model = "mobilenetv2" }
    ShuffleNet = { missing = "no ShuffleNet" }

Each value of a key that occurs in a cell needs its entry, and each entry a cell. Besides settings
an entry may have:

- ``preset``, in place of the table's;
- ``missing``: why such cells cannot be run; they stay visible with the paper's numbers;
- ``differs``: what differs from the paper and no setting tells;
- ``samples``: the paper's number of training samples;
- ``small``: what ``--small`` changes there, such as another data set; not for methods. Of a client:
  of its node config.

Later axes win, and the method's over all. What depends on several keys stands in cases, which win
over axes::

    [[tables.cases]]
    place = { dataset = "CIFAR-10", partition = "BC" }
    "partition.clusters" = "96"

An axis above the tables holds for all tables that print its key; a list of values in a table
(``C = ["1", "2"]``) takes these from it.

Nodes with data sets of their own stand in ``[tables.clients]``, by the paper's names, with their
node config. Cells that differ only in ``client`` are read off one run; ``Average`` is the nodes'
mean::

    [tables.clients]
    MNIST = { dataset = "mnist" }
    SVHN = { missing = "no SVHN" }

With ``parts = 3`` each of these data sets is dealt to three nodes. ``[clients.DIGITS]`` above the
tables names such nodes for ``clients = "DIGITS"``.

``data-root`` is below the command's, and ``partition.index-file`` below that. A ``module:function``
in its place gets the data root and gives what the file would have.

``accuracy`` in a cell that is reached or not (CADIS, table II) is the target to which rounds are
counted, and needs no axis. A figure, and a table without ``facts``, have a row for each combination
of their axes' values; numbers that the text states stand beside them.
"""

import hashlib
import itertools
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self

from flwr.common.config import flatten_dict
from pydantic import BaseModel, ConfigDict, model_validator

from benchmarks.in_process import Settings
from benchmarks.papers.facts import Cell, Results, Value, read_facts
from flwr_distill.flower.own_app import PRESETS
from flwr_distill.simulation.run import on_devices

CLIENT, TARGET, MEAN = "client", "accuracy", "Average"
"""Keys of cells that are read off one run, and the client that is the mean of all."""


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Change(_Data):
    """What a value of an axis, or a client, changes."""

    preset: str = ""
    missing: str = ""
    differs: str = ""
    samples: int = 0
    small: Settings = {}
    settings: Settings = {}

    @model_validator(mode="before")
    @classmethod
    def _from_line(cls, line: dict[str, Any]) -> dict[str, Any]:
        own = {key: line[key] for key in line.keys() & cls.model_fields.keys()}
        return {**own, "settings": {key: line[key] for key in line.keys() - own.keys()}}


class Case(Change):
    """What cells change whose place has all these values."""

    place: dict[str, Value]

    def fits(self, place: Mapping[str, Value]) -> bool:
        """Whether a cell's place has them."""
        return self.place.items() <= place.items()


class Table(_Data):
    """A table or figure of a paper.

    Parameters
    ----------
    paper : str (default: "")
        Name of the facts; empty for our own tables, which have a name and a title.
    facts : str (default: "")
        Number of the table in the paper, or ``figure N``.
    name, title : str (default: "")
        For the command line, and what is measured; by default both follow from the facts.
    preset : str (default: "")
        Preset of all cells whose axes name no other.
    metric : str (default: "last")
        What the paper prints: accuracy after the ``last`` round, the ``best`` of any round, the
        mean of the ``last-ten``, ``rounds`` to a target accuracy, or ``round-trips`` of models.
    first_round : int (default: 1)
        What the paper calls its first round, where rounds are counted.
    relative_to : str (default: "")
        Method whose traffic or rounds others are compared with.
    missing : str (default: "")
        Why it cannot be run anywhere.
    differs : str (default: "")
        What differs from the paper in all cells and no setting tells.
    gpu : str (default: "")
        What makes the whole setting too much for a CPU; shown in the list.
    settings, small : Settings (default: {})
        What all cells change of their preset; what ``--small`` changes besides.
    small_reason : str (default: "")
        What the smaller setting keeps, and why it is enough.
    small_target : float (default: 0.0)
        With ``--small``, the accuracy to which rounds are counted, in percent; 0 takes the paper's.
    axes : Mapping[str, str | Mapping[str, Change]] (default: {})
        What each value of a cell's key changes; a text is the setting that takes the value itself.
    cases : tuple[Case, ...] (default: ())
        What combinations of values change.
    clients : Mapping[str, Change] (default: {})
        Nodes with data sets of their own.
    parts : int (default: 1)
        Nodes to which each of these data sets is dealt.
    plot : str (default: "")
        For a figure: ``accuracy`` by round, or ``traffic`` to the accuracies `targets`.
    panel : str (default: "")
        Key whose values have a panel each.
    targets : tuple[float, ...] (default: ())
        In percent.
    running : int (default: 1)
        Rounds over which a plotted accuracy is averaged.
    """

    paper: str = ""
    facts: str = ""
    name: str = ""
    title: str = ""
    preset: str = ""
    metric: Literal["last", "best", "last-ten", "rounds", "round-trips"] = "last"
    first_round: int = 1
    relative_to: str = ""
    missing: str = ""
    differs: str = ""
    gpu: str = ""
    settings: Settings = {}
    small: Settings = {}
    small_reason: str = ""
    small_target: float = 0.0
    axes: Mapping[str, str | Mapping[str, Change]] = {}
    cases: tuple[Case, ...] = ()
    clients: Mapping[str, Change] = {}
    parts: int = 1
    plot: Literal["", "accuracy", "traffic"] = ""
    panel: str = ""
    targets: tuple[float, ...] = ()
    running: int = 1

    @model_validator(mode="before")
    @classmethod
    def _named(cls, values: dict[str, Any]) -> dict[str, Any]:
        if not values.get("facts"):
            return {**values, "paper": ""}
        name = f"{values['paper']}-{values['facts']}".lower().replace(" ", "-")
        title = read_facts()[values["paper"]].results(values["facts"]).title
        return {"name": name, "title": title, **values}

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if bool(self.small) != bool(self.small_reason):
            raise ValueError(f"{self.name}: small and small_reason must be given together")
        if self.missing:
            return self
        methods = self.axes.get("method", {})
        if not isinstance(methods, str) and any(each.small for each in methods.values()):
            raise ValueError(f"{self.name}: small must be the same for all methods")
        if any(case.small and "method" in case.place for case in self.cases):
            raise ValueError(f"{self.name}: small must be the same for all methods")
        for case in self.cases:
            if not any(case.fits(cell.place) for cell in self.cells()):
                raise ValueError(f"{self.name}: no cell has {case.place}")
        if self._is_product and any(isinstance(axis, str) for axis in self.axes.values()):
            raise ValueError(f"{self.name}: name the values of each axis")
        if self.facts:
            self._check_axes(self.results().cells)
        return self

    @property
    def _is_product(self) -> bool:
        """Whether it has a row for each combination of its axes' values."""
        return not self.facts or self.facts.startswith("figure")

    def _check_axes(self, cells: tuple[Cell, ...]) -> None:
        for key, axis in self.axes.items():
            printed = {_text(cell.place[key]) for cell in cells if key in cell.place}
            known = printed if isinstance(axis, str) else {*axis}
            extra = set() if self._is_product else known - printed
            if missing := extra | (printed - known):
                raise ValueError(f"{self.name}: axis {key} and the cells differ: {missing}")
        placed = {key for cell in cells for key in cell.place}
        free = {TARGET, *([CLIENT] if self.clients else [])}
        if without := placed - self.axes.keys() - free:
            raise ValueError(f"{self.name}: no axis for {', '.join(without)}")
        clients = {_text(cell.place[CLIENT]) for cell in cells if CLIENT in cell.place} - {MEAN}
        if clients and clients != self.clients.keys():
            raise ValueError(f"{self.name}: clients and the cells differ")

    def results(self) -> Results:
        """What the paper has of it."""
        return read_facts()[self.paper].results(self.facts)

    def cells(self) -> tuple[Cell, ...]:
        """The paper's cells; of a figure, one for each combination of its axes' values."""
        printed = self.results().cells if self.facts else ()
        if self.missing or not self._is_product:
            return printed
        names = [axis for axis in self.axes.values() if not isinstance(axis, str)]
        places = [
            {key: _number(value) for key, value in zip(self.axes, values, strict=True)}
            for values in itertools.product(*names)
        ]
        stated = {json.dumps(cell.place, sort_keys=True): cell for cell in printed}
        empty = [Cell.model_construct(place=place, numbers={}) for place in places]
        return tuple(stated.get(json.dumps(c.place, sort_keys=True), c) for c in empty)

    def rows(self, *, small: bool) -> "list[Row]":
        """A row for each cell, with the settings of its run."""
        return [self._row(cell, small=small) for cell in self.cells()]

    def _row(self, cell: Cell, *, small: bool) -> "Row":
        if self.missing:
            return Row(cell, (self.missing,))
        changes = [
            Change.model_validate({axis: cell.place[key]})
            if isinstance(axis, str)
            else axis[_text(cell.place[key])]
            for key, axis in self.axes.items()
        ]
        changes += [case for case in self.cases if case.fits(cell.place)]
        client = self.clients.get(str(cell.place.get(CLIENT)))
        if missing := tuple(each.missing for each in (*changes, client) if each and each.missing):
            return Row(cell, missing)
        preset = next((c.preset for c in reversed(changes) if c.preset), self.preset)
        full = {**read_preset(preset), **self.settings}
        for change in changes:
            full |= change.settings
        ours = {**full, **(self.small if small else {})}
        for change in changes:
            ours |= change.small if small else {}
        nodes = self.node_configs(ours, small=small)
        ours["min-nodes"] = len(nodes)
        texts = [change.differs for change in changes if change.differs]
        if len(nodes) < self.parts * len(self.clients):
            texts.append(f"{len(nodes)} of {self.parts * len(self.clients)} clients")
        samples = next((change.samples for change in changes if change.samples), 0)
        target = self.small_target if small else 0.0
        if target:
            texts.append(f"rounds to {target:g} %, not {self.results().target_accuracy:g} %")
        return Row(cell, (), full, ours, nodes, "; ".join(texts), samples, target)

    def node_configs(self, settings: Settings, *, small: bool) -> list[Settings]:
        """Node config of each node of a run, on its GPU if the machine has one."""
        if not self.clients:
            number = int(settings["min-nodes"])
            own: list[Settings] = [{"num-partitions": number}] * number
        else:
            parts: list[Settings] = [
                {"num-partitions": self.parts, "partition-id": part} if self.parts > 1 else {}
                for part in range(self.parts)
            ]
            own = [
                {**client.settings, **(client.small if small else {}), **part}
                for client in self.clients.values()
                if not client.missing
                for part in parts
            ]
        return on_devices(own, "auto")

    def place_of(self, client: str) -> int:
        """Place of a client among the nodes."""
        return [name for name, each in self.clients.items() if not each.missing].index(client)


@dataclass(frozen=True)
class Row:
    """A row of a table: the paper's cell, and our run of it.

    Parameters
    ----------
    cell : Cell
        Place and numbers in the paper.
    missing : tuple[str, ...]
        Why it cannot be run anywhere; empty if it can.
    full, ours : Settings
        The paper's setting, and that of our run.
    nodes : list[Settings]
        Node configs of our run.
    differs : str
        What differs and no setting tells.
    samples : int
        The paper's training samples; 0 if unknown.
    target : float
        Accuracy to which rounds are counted in place of the paper's; 0 for that.
    """

    cell: Cell
    missing: tuple[str, ...]
    full: Settings = field(default_factory=dict)
    ours: Settings = field(default_factory=dict)
    nodes: list[Settings] = field(default_factory=list)
    differs: str = ""
    samples: int = 0
    target: float = 0.0

    @property
    def place(self) -> dict[str, Value]:
        """Where it stands in the paper."""
        return self.cell.place

    @property
    def rounds(self) -> int:
        """Rounds of our run."""
        return int(self.ours["num-rounds"])

    @property
    def method(self) -> str:
        """The paper's name of the method."""
        return str(self.place.get("method", ""))

    def seeded(self, seed: int) -> Settings:
        """Settings of our run with a seed."""
        return {**self.ours, "seed": seed}

    def folder(self, out: Path, seed: int) -> Path:
        """Folder of its run; rows and tables with the same settings share it."""
        nodes = [{k: v for k, v in node.items() if k != "device"} for node in self.nodes]
        run = json.dumps([self.seeded(seed), nodes], sort_keys=True)
        words = f"{self.method} {seed} {hashlib.sha256(run.encode()).hexdigest()[:10]}".lower()
        return out / "".join(c if c.isalnum() or c in ".+" else "-" for c in words.strip())

    def matches(self, where: Mapping[str, set[str]]) -> bool:
        """Whether each key has one of the given values; 1.0 is also 1."""
        own = {key: self.place.get(key, "") for key in where}
        return all({str(own[key]), _text(own[key])} & values for key, values in where.items())


@cache
def read_preset(name: str) -> Settings:
    """Settings of a preset, with dotted keys; of no preset none."""
    if not name:
        return {}
    return flatten_dict(tomllib.loads((PRESETS / f"{name}.toml").read_text()))


@cache
def read_tables() -> dict[str, Table]:
    """All tables by name; what stands above the tables of a file holds for those without it."""
    tables = {}
    for file in sorted(Path(__file__).parent.glob("*.toml")):
        common = tomllib.loads(file.read_text())
        axes, clients = common.pop("axes", {}), common.pop("clients", {})
        for own in common.pop("tables"):
            own["axes"] = _axes(file.stem, own, axes)
            if isinstance(own.get("clients"), str):
                own["clients"] = clients[own["clients"]]
            table = Table.model_validate({"paper": file.stem, **common, **own})
            tables[table.name] = table
    return tables


def _axes(paper: str, table: dict[str, Any], common: dict[str, Any]) -> dict[str, Any]:
    """A table's axes, and those of its file for other keys that it prints; the method's last."""
    own = table.get("axes", {})
    facts = table.get("facts", "")
    cells = read_facts()[paper].results(facts).cells if facts and not table.get("missing") else ()
    printed: dict[str, set[str]] = {}
    for cell in cells:
        for key, value in cell.place.items():
            printed.setdefault(key, set()).add(_text(value))
    axes = {key: common[key] for key in common if key in printed and key not in own} | own
    for key, axis in axes.items():
        if isinstance(axis, list):
            axes[key] = {value: common[key][value] for value in axis}
        elif key not in own and not isinstance(axis, str):
            axes[key] = {value: each for value, each in axis.items() if value in printed[key]}
    return dict(sorted(axes.items(), key=lambda item: item[0] == "method"))


def _text(value: Value) -> str:
    """A value as the key of an axis: 0.1 and 1 for 0.1 and 1.0."""
    return f"{value:g}" if isinstance(value, (int, float)) else value


def _number(text: str) -> Value:
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        return text
