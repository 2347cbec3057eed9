"""VHL: shared virtual images of noise, which all nodes learn beside their own samples."""

from collections.abc import Mapping
from typing import Any, Self

from flwr.app import ConfigRecord

from flwr_distill.strategies.common.checked import CheckedFedAvg
from flwr_distill.strategies.common.run import Run
from flwr_distill.task.errors import SettingsError
from flwr_distill_baselines.vhl.method import VIRTUAL_TASK, VHLSettings, VirtualTaskRequest


class VHL(CheckedFedAvg):
    """FedAvg whose nodes share a second, virtual task (Tang et al. 2022).

    All nodes draw the same labelled images of noise from a seed. In each step a node also learns a
    minibatch of them, and pulls its own samples' features to those of virtual images of their class
    (`client.VirtualTask`). So features of a class agree between nodes.

    Parameters
    ----------
    seed : int (default: 0)
        Seed of the virtual images.
    **kwargs
        Settings (`method.VHLSettings`), and what Flower's FedAvg takes.

    Notes
    -----
    The paper's images come from an untrained StyleGAN-v2, ``images="stylegan"``; by default they
    are smooth noise around a pattern of their class, which is quicker. As in the paper, and unlike
    the published code's default, virtual classes are those of the task, not further ones.
    """

    settings: VHLSettings = VHLSettings()
    run_arguments = ("seed",)

    def __init__(self, *, seed: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        values = {**self.settings.model_dump(by_alias=True), "seed": seed}
        self.request = VirtualTaskRequest.checked(values, "vhl")

    @classmethod
    def from_run(cls, settings: VHLSettings, run: Run, **arguments: Any) -> Self:
        """Make the strategy for a run of our ServerApp; SettingsError if the data do not fit."""
        if run.spec.kind == "text":
            raise SettingsError(
                f"{run.spec.name!r} has texts, for which there are no virtual images",
                where="strategy",
                value="vhl",
                remedy="take another strategy",
            )
        if run.spec.kind != "image" and settings.images == "stylegan":
            raise SettingsError(
                f"{run.spec.name!r} has no images, which a StyleGAN makes",
                where="vhl.images",
                value=settings.images,
                remedy='take "noise"',
            )
        return super().from_run(settings, run, **arguments)

    def records(self) -> Mapping[str, ConfigRecord]:
        """Ask for the virtual task."""
        return {VIRTUAL_TASK: ConfigRecord(self.request.model_dump(by_alias=True))}
