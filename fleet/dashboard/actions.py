"""What may be done from the dashboard: submit, stop, resume and export runs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from flwr_distill.fleet.dashboard.files import copy_run, read_run
from flwr_distill.fleet.dashboard.runs import Run
from flwr_distill.fleet.dashboard.watch import Place
from flwr_distill.fleet.federation_record import FederationFile
from flwr_distill.fleet.queue.door import SOCKET, call
from flwr_distill.fleet.queue.entry import TOKEN
from flwr_distill.fleet.run_settings import checked, fitted, read_settings
from flwr_distill.flower.own_app import APP_DIR
from flwr_distill.task.errors import ReportedError
from flwr_distill.task.settings import RunConfigValue

EXPORT_TIMEOUT = 300.0
"""Seconds for the export of a model."""
MAX_SETTINGS = 10_000
"""Characters of settings that a user may type."""
MAX_EXPORTS = 5


class ActionError(ReportedError):
    """An action was refused."""


@dataclass(frozen=True)
class Actions:
    """Actions at a place; each says in a sentence what it has done, or raises a `ReportedError`.

    Exported models are in the folder `exports`, the last `MAX_EXPORTS` of them.
    """

    place: Place
    exports: Path

    def submit(self, preset: str, text: str) -> str:
        """Submit a run of this app: with a preset, or none, and more settings as on a command line.

        Where a queue is served, the run waits there for its turn.
        """
        if len(text) > MAX_SETTINGS or text.strip().endswith(".toml"):
            raise ActionError("give key=value pairs", where="settings", value=text[:80])
        return self._submit(read_settings(preset or None, [text] if text.strip() else []))

    def resume(self, run: Run) -> str:
        """Submit a run that continues another one, with its settings."""
        if run.folder is None or run.live:
            raise ActionError("has nothing to resume", where=f"run {run.run_id}")
        try:
            changed = read_run(run.folder).changed_settings
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            problem = "its settings.json is missing or malformed"
            raise ActionError(problem, where=f"run {run.run_id}") from error
        settings = {
            key: value
            for key, value in changed.items()
            if isinstance(value, bool | int | float | str) and key != TOKEN
        }
        return self._submit({**settings, "resume": run.folder.name})

    def stop(self, run: Run) -> str:
        """Stop a run."""
        with self.place.control() as control:
            control.stop_run(int(run.run_id))
        return f"Run {run.run_id} is being stopped."

    def export(self, run: Run) -> str:
        """Write a run's model and card to a folder of this process.

        The export reads a copy of the run's files, and writes outside its folder: the ServerApp may
        have left links there.
        """
        if run.folder is None:
            raise ActionError("has no results", where=f"run {run.run_id}")
        name, target = run.folder.name, self.exports / run.folder.name
        with TemporaryDirectory(prefix="export-") as copies:
            try:
                copy_run(run.folder, Path(copies, name))
            except OSError as error:
                raise ActionError(f"cannot be exported: {error}", where=f"run {name}") from error
            shutil.rmtree(target, ignore_errors=True)
            self._run_export(Path(copies), name, target)
        for old in sorted(self.exports.iterdir(), key=_changed)[:-MAX_EXPORTS]:
            shutil.rmtree(old, ignore_errors=True)
        return f"The model of run {run.run_id} is exported."

    def exported(self, run: Run) -> list[Path]:
        """Files of a run's last export."""
        folder = self.exports / run.folder.name if run.folder else None
        return sorted(folder.iterdir()) if folder and folder.is_dir() else []

    def _run_export(self, runs_dir: Path, name: str, target: Path) -> None:
        # In a process of its own: PyTorch would stay in this one's memory.
        command = [sys.executable, "-P", "-m", "flwr_distill.command", "runs", "export"]
        command += ["--runs-dir", str(runs_dir), "--output", str(target), "--", name]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=EXPORT_TIMEOUT, check=False
            )
        except subprocess.TimeoutExpired:
            raise ActionError(
                f"was not exported within {EXPORT_TIMEOUT:.0f} s", where=f"run {name}"
            ) from None
        if done.returncode:
            raise ActionError(done.stderr.strip()[-500:] or f"exit code {done.returncode}")

    def _submit(self, settings: dict[str, RunConfigValue]) -> str:
        from flwr_distill.flower.bundle import app_bundle  # here: imports Flower

        checked(settings)
        if record := FederationFile(self.place.state_dir).read():
            settings = fitted(settings, record)
        bundle = app_bundle(APP_DIR, settings)
        if (self.place.state_dir / SOCKET).exists():
            number = call(self.place.state_dir, bundle, call="add", order={"run_config": settings})
            return f"Run {number} is in the queue."
        with self.place.control() as control:
            return f"Run {control.start_run(bundle, settings)} has started."


def _changed(folder: Path) -> float:
    return folder.stat().st_mtime
