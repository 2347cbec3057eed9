"""Interface of loss terms."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from flwr.app import RecordDict
from torch import Tensor, nn

from flwr_distill.client.session import Session
from flwr_distill.task.settings import TrainSettings

Mixes = Literal["weights", "sample", "minibatch"]


class LossTerm(ABC):
    """Added to the cross-entropy of each minibatch; made anew in each round.

    Attributes
    ----------
    mixes : str
        What the value depends on, which decides its treatment under differential privacy:
        ``weights`` alone (its gradient joins the noisy one), each ``sample`` separately (clipped
        with that sample's loss), or the ``minibatch`` as a whole (refused, the default).
    """

    mixes: ClassVar[Mixes] = "minibatch"

    @classmethod
    @abstractmethod
    def of(
        cls, session: Session, content: RecordDict, model: nn.Module, settings: TrainSettings
    ) -> Self | None:
        """Make the term that a train message asks for; None if there is nothing to add.

        Parameters
        ----------
        session : Session
            The node's, in the round.
        content : RecordDict
            Of the train message.
        model : nn.Module
            The global model, before training.
        settings : TrainSettings
            Settings of the round.

        Raises
        ------
        SettingsError
            If the message is malformed, or the settings exclude the term.
        """

    @abstractmethod
    def __call__(self, inputs: Tensor, labels: Tensor, logits: Tensor) -> Tensor:
        """Value of the term on a minibatch: a scalar, differentiable in the model's parameters.

        Parameters
        ----------
        inputs : Tensor
            The minibatch, (n, ...).
        labels : Tensor
            Its classes, (n,), or soft labels (n, classes).
        logits : Tensor
            Output of the model in training, (n, classes).
        """

    def finish(self, model: nn.Module, steps: int) -> Mapping[str, Any]:
        """After training: store what the next round needs; return records for the reply, by name.

        `steps` is the number of optimisation steps taken.
        """
        return {}
