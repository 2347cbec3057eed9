"""What the parts found, as JSON and Markdown."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu_kit.parts import Part, table
from benchmarks.gpu_kit.runner import PASSED, Outcome


class Results:
    """Results of the parts so far, written after each.

    Parameters
    ----------
    folder : Path
        For ``results.json`` and ``results.md``.
    machine : dict[str, Any]
        As `benchmarks.gpu_kit.machine` prints it.
    commit : str
        Of the code that ran.
    """

    def __init__(self, folder: Path, machine: dict[str, Any], commit: str) -> None:
        self._folder = folder
        self._about = {
            **machine,
            "commit": commit,
            "date": datetime.now(UTC).isoformat(timespec="minutes"),
        }
        self._parts: dict[str, tuple[Part, Outcome]] = {}

    def add(self, part: Part, outcome: Outcome) -> None:
        """Add a part's outcome and write all."""
        self._parts[part.name] = part, outcome
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "results.json").write_text(json.dumps(self.as_json(), indent=1) + "\n")
        (self._folder / "results.md").write_text("\n".join(self.markdown()) + "\n")

    @property
    def goals(self) -> list[dict[str, Any]]:
        """The parts' goals, with ``part``."""
        return [
            {"part": name, **goal}
            for name, (_, outcome) in self._parts.items()
            for goal in outcome.figures.get("goals", [])
        ]

    @property
    def failed(self) -> bool:
        """Whether a part failed, or missed a goal on a GPU."""
        missed = self._about["gpu"] and any(goal["met"] is False for goal in self.goals)
        return bool(missed) or any(o.result != PASSED for _, o in self._parts.values())

    def as_json(self) -> dict[str, Any]:
        """All that is known."""
        parts = {
            name: {"result": o.result, "seconds": o.seconds, "limit": part.limit, **o.figures}
            for name, (part, o) in self._parts.items()
        }
        return {"machine": self._about, "goals": self.goals, "parts": parts}

    def markdown(self) -> list[str]:
        """A page with a section for each part."""
        about = self._about
        where = (
            f"{about['gpu']}, driver {about['driver']}" if about["gpu"] else "**the CPU: no GPU**"
        )
        lines = [
            f"{about['date'][:10]}, commit {about['commit']}: {where}; PyTorch {about['torch']}, "
            f"CUDA {about['cuda']}, Python {about['python']}, {about['cores']} cores.",
            "",
        ]
        rows = [
            [name, outcome.result, f"{outcome.seconds:.0f}", f"{part.limit:.0f}"]
            for name, (part, outcome) in self._parts.items()
        ]
        lines += [*table(["part", "result", "seconds", "limit"], rows), ""]
        if self.goals:
            rows = [_goal(goal) for goal in self.goals]
            lines += [*table(["goal", "measured", "bound", ""], rows), ""]
        for name, (part, outcome) in self._parts.items():
            if outcome.figures:
                lines += [f"**{name}**", "", *_shown(part, outcome), ""]
        return lines


def _shown(part: Part, outcome: Outcome) -> list[str]:
    try:
        return part.show(outcome.figures)
    except Exception as error:  # figures of a part that failed half-way
        return [f"cannot be shown: {error!r}"]


def _goal(goal: dict[str, Any]) -> list[str]:
    measured = "-" if goal["measured"] is None else f"{goal['measured']:.3g}"
    return [goal["name"], measured, goal["bound"], goal["verdict"]]
