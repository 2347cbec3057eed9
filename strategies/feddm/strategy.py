"""FedDM: the server trains on virtual data that nodes distil around the global model."""

import torch
from flwr.app import ConfigRecord, Message
from flwr.serverapp import Grid
from torch import Tensor, nn

from flwr_distill.strategies.common.virtual_training import VirtualTraining
from flwr_distill.strategies.feddm.method import DISTILL_AROUND, FedDMSettings


class FedDM(VirtualTraining):
    """Iterative distribution matching (Xiong et al. 2023).

    In each round nodes make virtual data that match the means of their own, class by class, in the
    features and logits of models around the global one
    (:func:`distill.perturbed_matching.distill_around`). They send these in place of a model. The
    server trains the global model on all of them, and no farther from where it was than `radius`.

    Parameters
    ----------
    **kwargs
        Settings (`strategies.feddm.method.FedDMSettings`), and what `VirtualTraining` takes.

    Raises
    ------
    SettingsError
        If a setting is out of range, or the data are no images.

    Notes
    -----
    Nodes start from noise with the mean and deviation of each class in every round, as the
    published code does from plain noise.
    """

    name = "feddm"
    settings: FedDMSettings = FedDMSettings()

    def requests(self, sampled: list[Message], grid: Grid) -> list[Message]:
        """Have the sampled nodes distil their data around the model."""
        request = ConfigRecord(self.settings.around_model.model_dump(by_alias=True))
        for message in sampled:
            message.content[DISTILL_AROUND] = request
        return [Message(m.content, m.metadata.dst_node_id, DISTILL_AROUND) for m in sampled]

    def after_step(self, weights: list[nn.Parameter], start: list[Tensor]) -> None:
        """Stay within `radius` of the model at the start of the round."""
        stay_within(weights, start, self.settings.radius)


@torch.no_grad()
def stay_within(weights: list[nn.Parameter], start: list[Tensor], radius: float) -> None:
    """Move weights back, in place, to the ball around a start (FedDM).

    Parameters
    ----------
    weights, start : list of Tensor
        One for each parameter, in the same order.
    radius : float
        Greatest norm of all changes together.
    """
    moved = [w - s for w, s in zip(weights, start, strict=True)]
    length = torch.stack([m.square().sum() for m in moved]).sum().sqrt()
    scale = (radius / length.clamp_min(1e-12)).clamp(max=1.0)
    for weight, origin, move in zip(weights, start, moved, strict=True):
        weight.copy_(origin + scale * move)
