"""Auto: declaration. Its phases and panels are those of the strategies that it may take."""

from flwr_distill.protocol.method import Method
from flwr_distill.strategies.analytic.method import METHODS as ANALYTIC
from flwr_distill.strategies.fedfa.method import METHODS as FEDFA
from flwr_distill.strategies.hfldd.method import METHODS as HFLDD
from flwr_distill.task.settings import Block, TrainSettings

CANDIDATES = {method.name: method for method in (*FEDFA, *HFLDD, *ANALYTIC)}
"""Methods that it may take, by name."""


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
        summary="Looks at how nodes' labels differ, or at a frozen model; takes what suits that.",
        phases=tuple(phase for method in CANDIDATES.values() for phase in method.phases),
        unprotected=_unprotected,
        panels=("flwr_distill.strategies.auto.rule:choice", *_panels()),
        formulas="flwr_distill.strategies.auto.strategy:formulas",
    ),
)
