"""FedAvg for nodes that may be hostile."""

from logging import WARNING
from typing import Any

from flwr.common import log

from flwr_distill.protocol.arrays import Arrays
from flwr_distill.strategies.common.checked import CheckedFedAvg, Update
from flwr_distill.strategies.common.robust import agreeing_mean

UNCLEAR = (
    "The directions of the nodes' %ss differ too much to tell a hostile one: in this round, and in "
    "others like it, nobody is left out for that"
)


class Agreement(CheckedFedAvg):
    """FedAvg by the rule ``agreement`` of :func:`strategies.common.robust.robust_mean`.

    Of five or more models, those that are far longer than most, or have far less in common with the
    others than these have, are rejected. None weighs more, or moves the global model by more, than
    the median where all nodes have as many samples; where these differ, by as much as they usually
    do. Fewer are averaged as FedAvg does. Where honest models differ much, nobody is rejected, and
    the log says so once.

    Parameters
    ----------
    **kwargs
        Those of Flower's FedAvg.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._said = False

    def combine(self, updates: list[Update]) -> Arrays:
        """Average the models that agree."""
        mean, _ = self.average(updates, self.start_of_round, "model")
        return mean

    def average(
        self, updates: list[Update], start: Arrays, part: str
    ) -> tuple[Arrays, list[Update]]:
        """Average the arrays that agree, and set the other replies aside.

        Parameters
        ----------
        updates : list of Update
            Their arrays are averaged.
        start : Mapping[str, ndarray]
            What they are changes of.
        part : str
            What the arrays are, for the reason.

        Returns
        -------
        Mapping[str, ndarray], list of Update
            The mean, and the updates that count.
        """
        arrays = [update.arrays for update in updates]
        weights = [update.num_examples for update in updates]
        mean, used, tells = agreeing_mean(weights, arrays, start)
        if not (tells or self._said):
            log(WARNING, UNCLEAR, part)
            self._said = True
        for update, weight in zip(updates, used, strict=True):
            if weight == 0:
                self.set_aside(update.reply, f"its {part} is out of line with most")
        return mean, [u for u, weight in zip(updates, used, strict=True) if weight]
