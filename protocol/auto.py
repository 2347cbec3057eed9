"""Auto: declaration. Its phases and panels are those of the strategies that it may take."""

from protocol import analytic, fedfa, fedseq, hfldd
from protocol.method import Method
from task.settings import Block, TrainSettings

CANDIDATES = {
    method.name: method for module in (fedfa, fedseq, hfldd, analytic) for method in module.METHODS
}
"""Methods that it may take, by name."""

CHOICE = "choice.json"
"""File of the run's result: the strategy that was taken, and why."""


class AutoSettings(Block):
    """Settings of auto (``auto.*``).

    Parameters
    ----------
    sequential : bool (default: False)
        Whether it may take FedSeq, where nodes hold several classes, but not most. FedSeq is a
        little more accurate there after as many rounds, but these last as long as up to
        ``fedseq.most-nodes`` nodes one after another, and each node gets the model of the one
        before it.
    """

    sequential: bool = False


def _panels() -> dict[str, None]:
    return dict.fromkeys(panel for method in CANDIDATES.values() for panel in method.panels)


def _unprotected(settings: AutoSettings, train: TrainSettings) -> str:
    return (
        "what auto takes is known only when the run has begun, and differential privacy may not "
        "cover it (name a strategy)"
    )


METHODS = (
    Method(
        name="auto",
        strategy="strategies.auto.strategy:Auto",
        summary="Looks at how nodes' labels differ, or at a frozen model; takes what suits that.",
        settings=AutoSettings,
        phases=tuple(phase for method in CANDIDATES.values() for phase in method.phases),
        unprotected=_unprotected,
        panels=("strategies.auto.panel:choice", *_panels()),
        formulas="strategies.auto.strategy:formulas",
        taken=CHOICE,
    ),
)
