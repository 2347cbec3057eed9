"""Auto: declaration. Its phases and panels are those of the strategies that it may take."""

from typing import Annotated

from pydantic import Field

from flwr_distill.protocol.method import Method
from flwr_distill.strategies.analytic.method import METHODS as ANALYTIC
from flwr_distill.strategies.fedfa.method import METHODS as FEDFA
from flwr_distill.strategies.flower.method import METHODS as FLOWER
from flwr_distill.strategies.hfldd.method import METHODS as HFLDD
from flwr_distill.task.settings import Block, TrainSettings

FEDAVG = next(method for method in FLOWER if method.name == "fedavg")
CANDIDATES = {method.name: method for method in (FEDAVG, *FEDFA, *HFLDD, *ANALYTIC)}
"""Methods that may race, by name."""


class AutoSettings(Block):
    """Settings of auto (``auto.*``)."""

    budget: Annotated[float, Field(ge=0, lt=0.5)] = 0.2
    """Share of the rounds that may be lost to compare strategies by a round each. With 0 none is
    tried, and the labels alone decide."""


def _panels() -> dict[str, None]:
    return dict.fromkeys(panel for method in CANDIDATES.values() for panel in method.panels)


def _unprotected(settings: Block | None, train: TrainSettings) -> str:
    return (
        "what auto takes is known only after the run's start, and differential privacy may not "
        "cover it (name a strategy)"
    )


METHODS = (
    Method(
        name="auto",
        strategy="flwr_distill.strategies.auto.strategy:Auto",
        summary="Compares strategies that suit the nodes' labels as it goes, on held-out samples.",
        settings=AutoSettings,
        phases=tuple(phase for method in CANDIDATES.values() for phase in method.phases),
        unprotected=_unprotected,
        panels=("flwr_distill.strategies.auto.panel:choice", *_panels()),
        formulas="flwr_distill.strategies.auto.strategy:formulas",
    ),
)
