"""`hooks = "wandb"`: a run at Weights & Biases, by its own environment variables."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr_distill.server.page.run_files import RunFiles
from flwr_distill.server.trackers.tracker import PROJECT, UPLOAD, Model, Tracker

RUN_ALONE: dict[str, Any] = {
    "silent": True,
    "console": "off",
    "save_code": False,
    "disable_git": True,
    "x_disable_stats": True,
    "x_disable_meta": True,
    "x_disable_machine_info": True,
    "x_save_requirements": False,
    "init_timeout": 20.0,
    "login_timeout": 20.0,
    "finish_timeout": UPLOAD,
    "x_graphql_timeout_seconds": 10.0,
    "x_graphql_retry_max": 2,
}
"""Keeps the machine, its packages, our code and the server's log to themselves, and bounds calls:
by default a process waits minutes at its end for a service that is down."""


class Wandb(Tracker):
    """A run there with config and curves, and artifacts: its files, and the model with its card."""

    package = "wandb"

    def open(self, run: RunFiles, settings: Mapping[str, Any]) -> None:
        """Start the run; nothing of the machine, its code or its console is sent."""
        import wandb

        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=run.folder.name,
            name=run.title,
            resume="allow",
            config=dict(settings),
            settings=RUN_ALONE,
        )

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Add numbers."""
        self._run.log(dict(numbers), step=step)

    def close(self, files: Sequence[Path], model: Model | None, *, failed: bool) -> None:
        """Add artifacts, and end the run."""
        import wandb

        results = wandb.Artifact(f"run-{self._run.id}", type="run")
        for file in files:
            results.add_file(str(file))
        self._run.log_artifact(results)
        if model:
            versions = wandb.Artifact(model.name, type="model", description=model.card)
            versions.add_dir(str(model.folder))
            self._run.log_artifact(versions)
        self._run.finish(exit_code=int(failed))
