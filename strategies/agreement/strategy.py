"""FedAvg for nodes that may be hostile."""

from logging import WARNING
from typing import Any

from flwr.common import log

from flwr_distill.protocol.arrays import Arrays
from flwr_distill.strategies.common.checked import CheckedFedAvg, Update
from flwr_distill.strategies.common.robust import agreeing_mean

UNCLEAR = (
    "The directions of the nodes' %ss differ too much to recognise a hostile one: in this round, "
    "and in others like it, no node is rejected for that"
)


class Agreement(CheckedFedAvg):
    """FedAvg by the rule ``agreement`` of :func:`strategies.common.robust.robust_mean`.

    Of five or more models, those that are far longer than most, or have far less in common with the
    others than these have, are rejected. None weighs more, or moves the global model by more, than
    the median where all nodes have as many samples; else by as much as their numbers differ. Fewer
    models are averaged as in FedAvg. Where honest models differ much, none is rejected, and the log
    says so once. Arguments are those of Flower's FedAvg.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._has_warned = False

    def combine(self, updates: list[Update]) -> Arrays:
        """Average the models that agree."""
        mean, _ = self.average(updates, self.start_of_round, "model")
        return mean

    def average(
        self, updates: list[Update], start: Arrays, part: str
    ) -> tuple[Arrays, list[Update]]:
        """Average the arrays that agree, and reject the other replies.

        `start` is what the arrays are changes of, `part` what they are, for the reason. Returns the
        mean, and the updates that count.
        """
        arrays = [update.arrays for update in updates]
        weights = [update.num_examples for update in updates]
        mean, used, is_clear = agreeing_mean(weights, arrays, start)
        if not (is_clear or self._has_warned):
            log(WARNING, UNCLEAR, part)
            self._has_warned = True
        for update, weight in zip(updates, used, strict=True):
            if weight == 0:
                self.set_aside(update.reply, f"its {part} is out of line with most")
        return mean, [u for u, weight in zip(updates, used, strict=True) if weight]
