"""The papers' facts: settings, equations and results, as data; README.md says how to read them."""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any, Self

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator

MEASURED = (
    *("value", "deviation", "rounds", "accuracy", "traffic_mb"),
    *("ratio", "reached", "speedup", "formula"),
)
"""Keys of a cell that are results."""
_REMARKS = ("note", "reason")
Value = bool | int | float | str


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow", populate_by_name=True)


class Cell(BaseModel):
    """A printed cell of a table.

    Parameters
    ----------
    place : dict[str, bool | int | float | str]
        Where it stands: method, dataset, C, alpha, client, ... Where rounds to an accuracy were
        measured that some methods do not reach (CADIS, table II), ``accuracy`` is a place.
    numbers : dict[str, bool | int | float | str]
        What is printed there: ``value`` with an optional ``deviation``; ``rounds``, ``accuracy``,
        ``traffic_mb``, ``ratio``; or ``reached``, ``rounds``, ``speedup``.
    remark : str (default: "")
        A note, or why it is uncertain.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    place: dict[str, Value]
    numbers: dict[str, Value]
    remark: str = ""

    @model_validator(mode="before")
    @classmethod
    def _from_line(cls, line: dict[str, Any]) -> dict[str, Any]:
        remark = "; ".join(line[key] for key in _REMARKS if key in line)
        measured = [key for key in MEASURED if key != "accuracy" or "reached" not in line]
        known = {*measured, *_REMARKS, "uncertain"}
        return {
            "place": {key: value for key, value in line.items() if key not in known},
            "numbers": {key: line[key] for key in measured if key in line},
            "remark": remark,
        }


class Results(_Data):
    """A table or a figure of a paper.

    Parameters
    ----------
    number : str
        As in the paper.
    title, metric, unit : str
        What was measured.
    cells : tuple[Cell, ...] (default: ())
        What is printed; of a figure, what the text states of it.
    setting : dict or str (default: {})
        What all cells share.
    target_accuracy : float, optional (default: None)
        Accuracy to which rounds are counted, in percent, where it is the same in all cells.
    """

    number: str = Field(validation_alias=AliasChoices("number_b", "number"))
    title: str
    metric: str = ""
    unit: str = ""
    cells: tuple[Cell, ...] = ()
    setting: dict[str, Any] | str = {}
    target_accuracy: float | None = None


class Facts(_Data):
    """What one file says of a paper; ``model_extra`` has what is named nowhere here."""

    paper: dict[str, Any]
    hyperparameters: dict[str, Any]
    tables: tuple[Results, ...]
    figures: tuple[Results, ...]

    @model_validator(mode="after")
    def _has_each_once(self) -> Self:
        for results in (self.tables, self.figures):
            numbers = [each.number for each in results]
            if len({*numbers}) < len(numbers):
                raise ValueError(f"two of the same number: {', '.join(numbers)}")
        return self

    def results(self, name: str) -> Results:
        """The table or figure of a name: ``VI``, ``figure 5``."""
        kind, _, number = name.rpartition(" ")
        found = self.figures if kind == "figure" else self.tables
        for each in found:
            if each.number == number:
                return each
        raise ValueError(f"{self.paper['name']} has no {kind or 'table'} {number}")


@cache
def read_facts() -> dict[str, Facts]:
    """Facts of each paper by the name of its file: hfldd, fedhead, cadis, fedlgd."""
    files = sorted(Path(__file__).parent.glob("*.toml"))
    return {file.stem: Facts.model_validate(tomllib.loads(file.read_text())) for file in files}
