"""Auto: declaration. Its phases and panels are those of the strategies that it may take."""

from flwr_distill.protocol import analytic, fedfa, hfldd
from flwr_distill.protocol.method import Method
from flwr_distill.task.settings import Block, TrainSettings

CANDIDATES = {
    method.name: method for module in (fedfa, hfldd, analytic) for method in module.METHODS
}
"""Methods that it may take, by name."""

CHOICE = "choice.json"
"""File of the run's result: the strategy that was taken, and why."""


def _panels() -> dict[str, None]:
    return dict.fromkeys(panel for method in CANDIDATES.values() for panel in method.panels)


def _unprotected(settings: Block | None, train: TrainSettings) -> str:
    return (
        "what auto takes is known only when the run has begun, and differential privacy may not "
        "cover it (name a strategy)"
    )


METHODS = (
    Method(
        name="auto",
        strategy="flwr_distill.strategies.auto.strategy:Auto",
        summary="Looks at how nodes' labels differ, or at a frozen model; takes what suits that.",
        phases=tuple(phase for method in CANDIDATES.values() for phase in method.phases),
        unprotected=_unprotected,
        panels=("flwr_distill.strategies.auto.panel:choice", *_panels()),
        formulas="flwr_distill.strategies.auto.strategy:formulas",
        taken=CHOICE,
    ),
)
