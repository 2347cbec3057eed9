"""Mean of the models of all rounds, where each is the work of one head."""

from collections.abc import Mapping
from typing import Any

from flwr_distill.protocol.arrays import Arrays, digest
from flwr_distill.strategies.common.averages import weighted_mean


class RoundMean:
    """The mean of rounds' models, the t-th of weight t, and the model that training continues from.

    One head's model leans towards what that node has; the mean of several heads' does not. Weights
    that grow let the mean follow (Lacoste-Julien et al. 2012, "A simpler approach to obtaining an
    O(1/t) convergence rate for the projected stochastic subgradient method", section 2).
    """

    def __init__(self) -> None:
        self._rounds = 0
        self._last: Arrays = {}
        self._mean: Arrays = {}
        self._digest = ""

    def start(self, model: Arrays) -> Arrays:
        """Model from which a round starts: the last one's if `model` is our mean, else `model`.

        A mean of what led elsewhere is of no use, so that it begins again in that case.
        """
        if not self._rounds or digest("", model) != self._digest:
            self._rounds, self._last = 0, {}
            return model
        self._mean = model
        return self._last

    def add(self, model: Arrays) -> Arrays:
        """Return the mean with the model of one more round."""
        self._rounds += 1
        newest = 2 / (self._rounds + 1)
        self._last = model
        if newest < 1:
            model = weighted_mean([(1 - newest, self._mean), (newest, model)])
        self._digest = digest("", model)
        return model

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint, besides the global model, which is the mean."""
        return {"mean-of": self._rounds, "mean-digest": self._digest, "last": dict(self._last)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state."""
        self._rounds, self._digest = state["mean-of"], state["mean-digest"]
        self._last = dict(state["last"])
