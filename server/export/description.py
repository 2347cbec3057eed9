"""What an exported model file says of itself, so that it can be used without its run."""

import json
from dataclasses import asdict, dataclass
from typing import Self

from pydantic import TypeAdapter, ValidationError

from server.page.run_files import RunFiles
from task.datasets import DataSpec
from task.models import architecture

KEY = "flwr-distill"
"""Name of the description among the metadata of each format."""


@dataclass(frozen=True)
class Description:
    """A model's inputs and outputs.

    Parameters
    ----------
    model : str
        Name of the architecture, as in the setting ``model`` but never ``auto``.
    spec : DataSpec
        Shape and normalisation of its inputs.
    classes : tuple[str, ...]
        Name of the class that each logit is for.
    """

    model: str
    spec: DataSpec
    classes: tuple[str, ...]

    @classmethod
    def of(cls, run: RunFiles) -> Self:
        """Describe a run's model, from the run's files; needs no data."""
        spec = TypeAdapter(DataSpec).validate_python(run.about["spec"])
        names = run.about.get("classes") or map(str, range(spec.num_classes))
        return cls(architecture(run.settings["model"], spec), spec, tuple(names))

    def to_json(self) -> str:
        """Return it as the text that stands in a model file."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read that text, which anybody may have written; ValueError if it describes no model."""
        try:
            description = TypeAdapter(cls).validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        names, expected = description.classes, description.spec.num_classes
        if len(names) != expected or not all(map(str.isprintable, names)):
            raise ValueError(f"classes: need {expected} printable names, got {len(names)}")
        return description
