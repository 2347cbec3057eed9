"""FedAvg for nodes that may be hostile."""

from logging import WARNING

from flwr.common import log

from protocol.arrays import Arrays
from protocol.robust import robust_mean
from strategies.common.checked import CheckedFedAvg, Update


class Agreement(CheckedFedAvg):
    """FedAvg by the rule ``agreement`` of :func:`protocol.robust.robust_mean`.

    Of five or more models, those that point away from most others, are far longer, or have far less
    in common with them than these have, are set aside; none moves the global model by more than the
    median, and none weighs more than the median. Fewer are averaged as FedAvg does.

    Parameters
    ----------
    **kwargs
        Those of Flower's FedAvg.
    """

    def combine(self, updates: list[Update]) -> Arrays:
        """Average the models that agree."""
        models = [update.arrays for update in updates]
        weights = [update.num_examples for update in updates]
        mean, used = robust_mean("agreement", weights, models, self.start_of_round)
        for update, weight in zip(updates, used, strict=True):
            if weight == 0:
                log(WARNING, "Model of node %d set aside: it is out of line with most", update.node)
        return mean
