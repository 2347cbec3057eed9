"""The description in an exported model file, by which it can be used without its run."""

import json
from dataclasses import asdict, dataclass, replace
from typing import Self

from pydantic import TypeAdapter, ValidationError

from flwr_distill.server.page.run_files import RunFiles
from flwr_distill.task.datasets import DataSpec
from flwr_distill.task.models import architecture

KEY = "flwr-distill"
"""Name of the description among the metadata of each format."""


@dataclass(frozen=True)
class Description:
    """A model's inputs and outputs."""

    model: str  # name of the architecture, as in the setting ``model`` but never ``auto``
    spec: DataSpec  # shape and normalisation of its inputs, and the run's label map

    @property
    def classes(self) -> tuple[str, ...]:
        """Name of the class that each logit is for."""
        return self.spec.class_names

    @classmethod
    def of(cls, run: RunFiles) -> Self:
        """Describe a run's model, from the run's files; needs no data."""
        spec = TypeAdapter(DataSpec).validate_python(run.about["spec"])
        names = tuple(run.class_names) or spec.class_names
        model = architecture(run.settings["model"], spec)
        return cls(model, replace(spec, labels=replace(spec.labels, classes=names)))

    def to_json(self) -> str:
        """The text in a model file."""
        return json.dumps(asdict(self))

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
        return description
