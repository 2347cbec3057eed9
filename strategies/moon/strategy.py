"""MOON: model-contrastive federated learning."""

from collections.abc import Mapping

from flwr.app import ConfigRecord

from flwr_distill.strategies.common.checked import RobustFedAvg
from flwr_distill.strategies.moon.method import MODEL_CONTRAST, MOONSettings


class MOON(RobustFedAvg):
    """FedAvg whose nodes keep their features near the global model's (Li et al. 2021).

    Node i adds mu times a contrastive loss to its own: features of the model in training are to be
    more like the global model's than like those of the node's model of its last round
    (:class:`strategies.moon.client.ModelContrastive`).

    Parameters
    ----------
    **kwargs
        Settings (`strategies.moon.method.MOONSettings`), and what `RobustFedAvg` takes.
    """

    settings: MOONSettings = MOONSettings()

    def records(self) -> Mapping[str, ConfigRecord]:
        """Ask for the contrastive loss."""
        return {MODEL_CONTRAST: ConfigRecord(self.settings.model_dump(by_alias=True))}
