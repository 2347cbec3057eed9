"""A term of the local loss."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from flwr.app import RecordDict
from torch import Tensor, nn

from client.session import Session
from task.settings import TrainSettings


class LossTerm(ABC):
    """Something added to the cross-entropy of each minibatch of a round.

    A term is made when the global model of the round has come and lives as long as the round.

    Attributes
    ----------
    mixes : str
        What enters its value, which decides how differential privacy treats it: ``weights`` alone
        (its gradient joins the noisy one), each ``sample`` by itself (clipped with that sample's
        loss), or the samples of a ``minibatch`` together (refused). By default the latter.
    """

    mixes: ClassVar[Literal["weights", "sample", "minibatch"]] = "minibatch"

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
            The global model as received, which is about to be trained.
        settings : TrainSettings
            Settings of the round.

        Raises
        ------
        SettingsError
            If the message is malformed, or the settings do not go with the term.
        """

    @abstractmethod
    def __call__(self, inputs: Tensor, labels: Tensor, logits: Tensor) -> Tensor:
        """Give the term's value on a minibatch, a scalar that the model's parameters reach.

        Parameters
        ----------
        inputs : Tensor
            The minibatch, (n, ...).
        labels : Tensor
            Its classes, (n,), or soft labels (n, classes).
        logits : Tensor
            What the model in training gave on it, (n, classes).
        """

    def finish(self, model: nn.Module, steps: int) -> Mapping[str, Any]:
        """Keep what the node's next round needs; give what joins its reply. By default nothing.

        Parameters
        ----------
        model : nn.Module
            The model as trained.
        steps : int
            Optimisation steps that were taken.

        Returns
        -------
        Mapping[str, ArrayRecord or ConfigRecord]
            Records of the reply, by name.
        """
        return {}
