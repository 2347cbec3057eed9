"""SCAFFOLD: control variates against the drift of nodes."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message

from flwr_distill.protocol.arrays import Arrays, as_record, finite_arrays, sent_arrays
from flwr_distill.protocol.schema import part_of_the_model
from flwr_distill.strategies.common.averages import weighted_mean
from flwr_distill.strategies.common.checked import CheckedFedAvg, Update
from flwr_distill.strategies.scaffold.method import CONTROL_VARIATE


class SCAFFOLD(CheckedFedAvg):
    """Stochastic controlled averaging (Karimireddy et al. 2020, option II).

    Node i takes steps along ``g - c_i + c``, and after K of them with learning rate eta keeps
    ``c_i+ = c_i - c + (w_t - w_i) / (K eta)`` (`client.ControlVariate`). Over the
    participants S of N nodes the server takes ``w <- 1/|S| sum_i w_i``, the paper's step with
    global step size 1, and ``c <- c + 1/N sum_i (c_i+ - c_i)``. Messages are twice a model's size,
    both ways.

    Parameters
    ----------
    **kwargs
        As Flower's FedAvg takes them.
    """

    state_keys = ("c",)

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.c: Arrays = {}
        """The server's control variate; what is missing is 0."""

    def records(self) -> Mapping[str, ArrayRecord]:
        """Send the server's control variate."""
        return {CONTROL_VARIATE: as_record(self.c)}

    def read(self, reply: Message) -> Update:
        """Read a reply, which must bring the change of the node's control variate."""
        change = sent_arrays(reply, CONTROL_VARIATE)
        if not change:
            raise ValueError(f"it brings no {CONTROL_VARIATE}")
        part_of_the_model(change, self.start_of_round)
        return super().read(reply)

    def combine(self, updates: list[Update]) -> Arrays:
        """Average the models, and move the server's control variate."""
        self.c = moved_variate(
            self.c,
            [finite_arrays(sent_arrays(u.reply, CONTROL_VARIATE)) for u in updates],
            self.num_nodes,
        )
        return weighted_mean((1.0, update.arrays) for update in updates)


def moved_variate(c: Arrays, changes: list[Arrays], num_nodes: int) -> Arrays:
    """The server's new control variate ``c + 1/N sum_i (c_i+ - c_i)``, float32.

    `changes` are the participants' ``c_i+ - c_i``; arrays that c does not have are 0.
    """
    moved = {name: array.astype(np.float64) for name, array in c.items()}
    for change in changes:
        for name, array in change.items():
            moved[name] = moved.get(name, 0.0) + array.astype(np.float64) / num_nodes
    return {name: array.astype(np.float32) for name, array in moved.items()}
