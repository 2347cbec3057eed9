"""`hooks = "mlflow"`: a run at MLflow, by MLflow's own environment variables."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr_distill.server.page.run_files import RunFiles
from flwr_distill.server.trackers.tracker import PROJECT, Model, Tracker

TAG = "flwr-distill-run"
LIMITS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}
"""Of a call, where the environment has no others: MLflow's own last for minutes."""
MAX_CARD = 5_000
"""Characters of a version's description; the file has all."""


class Mlflow(Tracker):
    """A run there with parameters, metrics and files, and a version of a registered model."""

    package = "mlflow"

    def open(self, run: RunFiles, settings: Mapping[str, Any]) -> None:
        """Start the run, or continue the one that has its id as a tag."""
        for name, value in {**LIMITS, "MLFLOW_DISABLE_TELEMETRY": "true"}.items():
            os.environ.setdefault(name, value)
        import mlflow

        own = run.folder.name
        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
        earlier: Any = mlflow.search_runs(
            filter_string=f"tags.`{TAG}` = '{own}'", output_format="list"
        )
        run_id = earlier[0].info.run_id if earlier else None
        there = mlflow.active_run() or mlflow.start_run(run_id, run_name=run.title, tags={TAG: own})
        self._info = there.info
        known = earlier[0].data.params if earlier else {}  # it refuses other values
        mlflow.log_params({name: settings[name] for name in settings.keys() - known.keys()})

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Add metrics."""
        import mlflow

        mlflow.log_metrics(dict(numbers), step=step)

    def close(self, files: Sequence[Path], model: Model | None, *, failed: bool) -> None:
        """Add artifacts, register the model with its card, and end the run."""
        import mlflow

        for file in files:
            mlflow.log_artifact(str(file))
        if model:
            mlflow.log_artifacts(str(model.folder), "model")
            client = mlflow.MlflowClient()
            if not client.search_registered_models(f"name = '{model.name}'"):
                client.create_registered_model(model.name)
            source, card = f"{self._info.artifact_uri}/model", model.card[:MAX_CARD]
            client.create_model_version(model.name, source, self._info.run_id, description=card)
        mlflow.end_run("FAILED" if failed else "FINISHED")
