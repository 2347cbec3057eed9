"""CADIS: settings and declaration."""

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from flwr_distill.protocol.method import Method
from flwr_distill.strategies.common.robust import Rule
from flwr_distill.task.settings import Block, TrainSettings


class CADISSettings(Block):
    """Settings of CADIS (``cadis.*``)."""

    aggregation: Literal["clusters", "cluster-sizes", "samples"] = "clusters"
    """Weights of nodes: ``clusters`` (by 1/|cluster of i| and samples; eq. 1 of the paper),
    ``cluster-sizes`` (by 1/|cluster of i| alone; the published code), or ``samples`` alone as in
    FedAvg."""
    cluster_size: Literal["participants", "seen"] = "participants"
    """Whom |cluster of i| counts: the round's ``participants``, so that each cluster among them has
    the same say, or all clients ``seen`` so far (the paper and its code)."""
    similarity: Literal["peak", "mean"] = "peak"
    """What a pair is judged by: the ``peak`` of its mean similarity S, or its present ``mean`` (eq.
    12 of the paper, and its code)."""
    rescaling: Literal["pairs", "positive"] = "pairs"
    """By which values S is rescaled to [0, 1]: those of known ``pairs`` (the paper), or the
    ``positive`` ones and 1, a client's similarity to itself (the published code). With the latter
    no two nodes share a cluster where none are nearly alike."""
    eps: Annotated[float, Field(gt=0, le=1)] = 0.975
    """Threshold eps of the first round, above which rescaled similarity links a pair (eq. 13). The
    paper tunes it for each data set; its values are lost. Defaults of the three keys of eps are the
    published code's."""
    eps_growth: Annotated[float, Field(ge=1)] = 1.0005
    """After round t, counted from 0, eps is multiplied by this to the power of t."""
    max_eps: Annotated[float, Field(gt=0, le=1, validate_default=True)] = 0.985
    """Highest eps."""
    closure: Literal["full", "one-step", "none"] = "full"
    """Who shares a cluster: all that linked pairs connect (``full``), pairs that are linked or have
    a common partner (``one-step``; the published code), or linked pairs alone (``none``; eq. 13 as
    printed)."""
    transitive: Literal["round", "all", "off"] = "round"
    """Which pairs that never met get an estimate: those with a node of the ``round``, through other
    nodes of the round, ``all`` through any node (the paper), or no pair (``off``; the published
    code as it runs by default)."""
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

    @field_validator("max_eps")
    @classmethod
    def _is_not_below(cls, highest: float, info: ValidationInfo) -> float:
        if highest < (first := info.data.get("eps", 0.0)):
            raise ValueError(f"must be at least cadis.eps, which is {first:g}")
        return highest


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
