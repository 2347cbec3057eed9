"""Auto: declaration. Its phases and panels are those of the strategies that it may take."""

from protocol import analytic, fedfa, hfldd
from protocol.method import Method
from task.settings import Block, TrainSettings

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
        strategy="strategies.auto.strategy:Auto",
        summary="Looks at how nodes' labels differ, or at a frozen model; takes what suits that.",
        phases=tuple(phase for method in CANDIDATES.values() for phase in method.phases),
        unprotected=_unprotected,
        panels=("strategies.auto.panel:choice", *_panels()),
        formulas="strategies.auto.strategy:formulas",
        taken=CHOICE,
    ),
)
