"""CADIS: settings and declaration."""

from typing import Annotated, Literal

from pydantic import Field

from protocol.method import Method
from task.settings import Block, TrainSettings


class CADISSettings(Block):
    """Settings of CADIS (``cadis.*``).

    Parameters
    ----------
    aggregation : str (default: "clusters")
        Weights by ``clusters``, or by ``samples`` alone as in FedAvg.
    kd_lambda : float (default: 1.0)
        lambda, weight of the nodes' regulariser; 0 for none.
    """

    aggregation: Literal["clusters", "samples"] = "clusters"
    kd_lambda: Annotated[float, Field(ge=0)] = 1.0


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
        strategy="strategies.cadis.strategy:CADIS",
        summary="Clusters by what training changes; every cluster has an equal say.",
        settings=CADISSettings,
        terms={"kd-lambda": "client.cadis:Relational"},
        unprotected=_unprotected,
    ),
)
