"""The run's task on the server: data shape, model and evaluation."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from flwr.app import ArrayRecord, MetricRecord
from torch import nn

from server.evaluation import server_evaluation
from server.settings import RunSettings
from task.datasets import DataSpec
from task.models import create_model
from task.source import data_spec, test_samples

Evaluate = Callable[[int, ArrayRecord], MetricRecord]


@dataclass(frozen=True)
class Task:
    """What a federation trains.

    `start` holds the initial weights. `evaluate` is None if the server has no test samples.
    """

    spec: DataSpec
    model: nn.Module
    start: ArrayRecord
    evaluate: Evaluate | None

    @classmethod
    def of(cls, settings: RunSettings) -> "Task":
        """Build the task from a run's settings."""
        spec = data_spec(settings)
        model = create_model(settings.model, spec, seed=settings.seed)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        test = test_samples(settings)
        return cls(
            spec=spec,
            model=model,
            start=ArrayRecord(model.state_dict()),
            evaluate=server_evaluation(model, test.to_samples(spec), device) if test else None,
        )
