"""The description in an exported model file, by which it can be used without its run."""

from dataclasses import dataclass, field, replace
from typing import Self

from pydantic import TypeAdapter, ValidationError
from torch import nn

from flwr_distill.server.page.run_files import RunFiles
from flwr_distill.task.backbone_settings import BackboneSettings
from flwr_distill.task.backbones.pretrained import is_own_network
from flwr_distill.task.datasets import DataSpec
from flwr_distill.task.models import architecture, create_model, is_code

KEY = "flwr-distill"
"""Name of the description among the metadata of each format."""


@dataclass(frozen=True)
class Description:
    """A model's inputs and outputs."""

    model: str  # as in the setting ``model``; ``auto`` stands beside a network of ``backbone``
    spec: DataSpec  # shape and normalisation of its inputs, and the run's label map
    backbone: BackboneSettings = field(default_factory=BackboneSettings)

    @property
    def architecture(self) -> str:
        """What the model is, by name."""
        return self.backbone.network or self.model

    @property
    def is_code(self) -> bool:
        """Whether building the model imports code that the description names."""
        return is_code(self.model) or is_own_network(self.backbone.network)

    def build(self, seed: int | None = None) -> nn.Module:
        """A model with new weights; ModelError if it cannot be built here."""
        return create_model(self.model, self.spec, seed, self.backbone)

    @property
    def classes(self) -> tuple[str, ...]:
        """Name of the class that each logit is for."""
        return self.spec.class_names

    @classmethod
    def of(cls, run: RunFiles) -> Self:
        """Describe a run's model, from the run's files; needs no data."""
        spec = TypeAdapter(DataSpec).validate_python(run.about["spec"])
        names = tuple(run.class_names) or spec.class_names
        spec = replace(spec, labels=replace(spec.labels, classes=names))
        # The model file has all weights.
        own = run.settings["backbone"] | {"weights": ""}
        backbone = BackboneSettings.checked(own, "run config")
        model = run.settings["model"]
        return cls(model if backbone.network else architecture(model, spec), spec, backbone)

    def to_json(self) -> str:
        """The text in a model file."""
        return TypeAdapter(Description).dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the untrusted text of a model file; ValueError if it describes no model."""
        try:
            description = TypeAdapter(cls).validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        if not description.spec.labels.classes:
            raise ValueError("spec.labels.classes: need the names of its classes; export it again")
        if description.backbone.weights:
            raise ValueError("backbone.weights: names a file, and its weights are in this one")
        return description
