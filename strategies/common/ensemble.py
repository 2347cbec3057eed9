"""Settings of ensemble distillation, on leaders (FedHEAD) and on the server (FedHEAD+, FedDF)."""

from typing import Annotated, Any, Literal

from pydantic import Field

from flwr_distill.task.settings import Block


class EnsembleDistillation(Block):
    """Distillation of an ensemble into one model (FedHEAD, step 4; FedHEAD+; FedDF)."""

    distill_epochs: Annotated[int, Field(ge=1)] = 20
    """n_s, most epochs of a distillation."""
    patience: Annotated[int, Field(ge=1)] = 5
    """Epochs without a lower loss on the held-out part after which it stops."""
    distill_lr: Annotated[float, Field(gt=0)] = 1e-3
    """Learning rate of Adam."""
    distill_weight_decay: Annotated[float, Field(ge=0)] = 1e-4
    """L2 penalty of Adam."""
    distill_batch_size: Annotated[int, Field(ge=1)] = 128
    """Samples in a minibatch."""
    average: Literal["probabilities", "logits"] = "probabilities"
    """What the teacher is the mean of: its members' ``probabilities`` or ``logits``."""
    restore_best: bool = True
    """Whether a distillation ends with the student of the lowest loss on the held-out part, which
    may be the untrained one. False ends with that of the last epoch: FedHEAD's paper stops early,
    and speaks of nothing that is restored."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Of `distill.ensemble.distil_ensemble`."""
        return {
            "epochs": self.distill_epochs,
            "patience": self.patience,
            "lr": self.distill_lr,
            "weight_decay": self.distill_weight_decay,
            "batch_size": self.distill_batch_size,
            "restore_best": self.restore_best,
        }
