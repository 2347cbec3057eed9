"""A run's settings before it is submitted: read, checked, and fitted to a local federation."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flwr_distill.fleet.federation_record import FederationRecord
from flwr_distill.fleet.run_config import read_run_config
from flwr_distill.flower.own_app import PRESETS
from flwr_distill.node.settings import NODE_CONFIG
from flwr_distill.server.record.writing import ResultsError, check_writable
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.settings import RunConfigValue

if TYPE_CHECKING:
    from flwr_distill.server.settings import RunSettings


def preset_names() -> list[str]:
    """Names of the papers' settings."""
    return sorted(file.stem for file in PRESETS.glob("*.toml"))


def read_settings(preset: str | None, texts: Sequence[str] = ()) -> dict[str, RunConfigValue]:
    """Settings of a preset and of texts as for `read_run_config`; the last value of a key counts.

    Raises SettingsError if there is no such preset, and RunConfigError for a text.
    """
    settings = read_run_config(str(_preset_file(preset))) if preset else {}
    for text in texts:
        settings |= read_run_config(text)
    return settings


def checked(overrides: Mapping[str, RunConfigValue]) -> RunSettings:
    """The settings of a run; SettingsError if one is unknown or out of range."""
    from flwr_distill.server.settings import RunSettings  # here: imports Flower

    return RunSettings.from_run_config(overrides)


def fitted(
    overrides: Mapping[str, RunConfigValue], federation: FederationRecord
) -> dict[str, RunConfigValue]:
    """Settings for a local federation, with all its nodes.

    Raises SettingsError or ResultsError if the run cannot work there.
    """
    _check_here(checked(overrides), Path(federation.working_dir))
    files = [Path(folder) / NODE_CONFIG for folder in federation.node_dirs]
    configs = [tomllib.loads(file.read_text("utf-8")) for file in files if file.exists()]
    if "dataset" not in overrides and any("data" in config for config in configs):
        problem = "these nodes have their own data"
        raise SettingsError(problem, remedy="give -c 'dataset=\"private\"'")
    return {"min-nodes": len(federation.node_dirs), **overrides}


def _preset_file(name: str) -> Path:
    if name in preset_names():
        return PRESETS / f"{name}.toml"
    near = difflib.get_close_matches(name, preset_names(), n=1)
    hint = f"did you mean {near[0]}?" if near else ""
    raise SettingsError(
        "is not one of " + ", ".join(preset_names()), where="preset", value=name, remedy=hint
    )


def _check_here(settings: RunSettings, working_dir: Path) -> None:
    """Check methods and folders, which a server on this machine shares with this command."""
    from flwr_distill.protocol.registry import check_strategy_name  # here: imports Flower

    check_strategy_name(settings.strategy)
    if settings.aggregator:
        check_strategy_name(settings.aggregator, "aggregator")
    try:
        check_writable(working_dir / settings.runs_dir)
    except ResultsError as error:
        raise ResultsError(f"runs-dir = {settings.runs_dir!r}: {error}") from None
