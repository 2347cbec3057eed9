"""CADIS: settings and declaration."""

from typing import Annotated, Literal

from pydantic import Field

from flwr_distill.protocol.method import Method
from flwr_distill.strategies.common.robust import Rule
from flwr_distill.task.settings import Block, TrainSettings


class CADISSettings(Block):
    """Settings of CADIS (``cadis.*``)."""

    aggregation: Literal["clusters", "samples"] = "clusters"
    """Weights by ``clusters``, or by ``samples`` alone as in FedAvg."""
    kd_lambda: Annotated[float, Field(ge=0)] = 1.0
    """lambda, weight of the nodes' regulariser; 0 for none."""
    most_say: Annotated[float, Field(ge=1)] = 2.0
    """A cluster's say is at most that many times its share of the round's nodes. With 2, less than
    a quarter of the nodes, each unlike all others, have less than half. With 1, clusters of equal
    nodes weigh by size; with as many as there are nodes, there is no cap, as in the paper."""
    main_cluster: Annotated[float, Field(ge=0, le=1)] = 0.4
    """Share of the nodes that the largest cluster must hold for clusters to have an equal say, and
    for the regulariser in the round after; else all is as in FedAvg. With many small clusters one
    node more or less in one, by accident, would tilt the model. 0 is the paper's."""
    rule: Rule = "mean"
    """How models of a cluster of five or more are averaged: ``mean``, ``agreement`` (without those
    that are out of line, none much longer than the median), ``multi-krum`` or ``trimmed-mean``.
    With any but the mean, long updates are moved back (to the median length, where all nodes have
    as many samples), and those rejected that are far longer than most, or point against both the
    last global step and most others."""


def _unprotected(settings: CADISSettings, train: TrainSettings) -> str:
    if settings.kd_lambda:
        return (
            f"cadis.kd-lambda = {settings.kd_lambda:g}: the regulariser mixes the samples of a "
            "minibatch (set cadis.kd-lambda to 0)"
        )
    return ""


METHODS = (
    Method(
        name="cadis",
        strategy="flwr_distill.strategies.cadis.strategy:CADIS",
        summary="Clusters by what training changes; every cluster has an equal say.",
        settings=CADISSettings,
        terms={"kd-lambda": "flwr_distill.strategies.cadis.client:Relational"},
        unprotected=_unprotected,
        defaults={"defence": {"cadis.most-say": 1.0, "cadis.rule": "agreement"}},
    ),
)
