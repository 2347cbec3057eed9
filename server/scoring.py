"""Checks that what a run is to be scored by is known in it, and what an evaluation needs."""

from flwr_distill.protocol.method import Method
from flwr_distill.server.settings import RunSettings
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.scores import MAX_CLASSES
from flwr_distill.task.settings import BALANCED, NO_WEIGHTS, stated_weights

PLAIN = "fedavg"
"""Strategy of a run that evaluates a model: Flower's plain messages."""


def check_scoring(
    settings: RunSettings, method: Method | None, *, num_classes: int, tests: bool
) -> None:
    """Check ``best-metric``, ``evaluate.*`` and ``train.class-weights``.

    `tests` says whether the server has test samples. Raises SettingsError if no round would have
    the metric, nodes have no counts to send, the weights are not of these classes, or a run that
    evaluates a model is of a strategy with other messages.
    """
    if settings.evaluate.model:
        _check_evaluation(settings)
    personal = method is not None and method.outcome == "personal"
    counts = settings.evaluate.counts
    if counts and not personal and not settings.fraction_evaluate:
        raise SettingsError(
            "counts are of evaluations on nodes, and there are none",
            where="evaluate.counts",
            value=counts,
            remedy="set fraction-evaluate to 1.0, or this to false",
        )
    if counts and num_classes > MAX_CLASSES:
        raise SettingsError(
            f"nodes send counts of {MAX_CLASSES} classes at most, and there are {num_classes}",
            where="evaluate.counts",
            value=counts,
            remedy="set it to false",
        )
    metric = settings.best_metric
    of_nodes = counts and not personal and metric != "loss"
    if metric != "accuracy" and not of_nodes and (personal or not tests):
        raise SettingsError(
            "no round has it: the server tests no model, and nodes send no counts for it",
            where="best-metric",
            value=metric,
            remedy="set it to accuracy, or evaluate.counts to true where nodes evaluate one model",
        )
    weights = settings.train.class_weights
    if weights not in (NO_WEIGHTS, BALANCED) and len(stated_weights(weights)) != num_classes:
        raise SettingsError(
            f"must be a number for each of {num_classes} classes",
            where="train.class-weights",
            value=weights,
            remedy='or "balanced"',
        )


def _check_evaluation(settings: RunSettings) -> None:
    needed = {"strategy": PLAIN, "start": "", "fraction-evaluate": 1.0}
    for key, value in needed.items():
        own = getattr(settings, key.replace("-", "_"))
        if own != value:
            raise SettingsError(
                "a run with evaluate.model asks every node once, and no more",
                where=key,
                value=own,
                remedy=f"set it to {value!r}",
            )
