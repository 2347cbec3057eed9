"""Flower's strategies that have a short name; others are named as ``module:Class``."""

from protocol.method import Method

_FLOWER = {
    "fedavg": ("FedAvg", "The mean of the nodes' models, weighted by their samples."),
    "fedmedian": ("FedMedian", "The median of the nodes' models."),
    "fedtrimmedavg": ("FedTrimmedAvg", "The mean without the extremes of each value."),
    "krum": ("Krum", "The model that is nearest to its neighbours."),
    "multikrum": ("MultiKrum", "The mean of the models that are nearest to their neighbours."),
}

METHODS = tuple(
    Method(name, f"flwr.serverapp.strategy.{name}:{cls}", summary)
    for name, (cls, summary) in _FLOWER.items()
)
