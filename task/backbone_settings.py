"""Settings of frozen networks (``backbone.*``)."""

import re
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from flwr_distill.task.block import Block


class BackboneSettings(Block):
    """The network of a model that is frozen but for its head (``backbone.*``)."""

    network: str = ""
    """Network in place of the model's, which must be ``auto``, with a linear head on its features:
    ``timm:NAME``, ``torchvision:NAME``, or ``module:Class`` of yours, called as ``Class()``, which
    maps images to features. Empty for the model's own."""
    weights: str = ""
    """File of its weights (safetensors), at the same path on the server and on every node; or
    ``@NAME``, which nodes' owners map to a file (``files``) and the server to NAME in its
    ``data-root``. Empty for those that come with the model; ``network`` has random ones then."""
    size: Annotated[int, Field(ge=0, le=4096)] = 0
    """Side in pixels to which images are scaled for the network. 0 is the run's own side, in steps
    of 32, between 128 and the network's own, or the network's if it takes no other; without such
    metadata, images stay as they are. 224 is more accurate on small photographs than 128, and takes
    three times as long."""
    mean: str = ""
    """Mean of the pixels, in [0, 1], that ``network`` was trained on, by channel, as in
    ``0.485,0.456,0.406``. Empty follows its metadata; without it, the run's own mean."""
    std: str = ""
    """Standard deviation of these pixels, by channel; empty as for ``mean``."""
    interpolation: Literal["", "bilinear", "bicubic", "nearest"] = ""
    """How images are scaled for ``network``: ``bilinear``, ``bicubic`` or ``nearest``. Empty
    follows its metadata, and is ``bilinear`` without it."""
    fourier: Annotated[int, Field(ge=0, le=2**16)] = 0
    """Random Fourier features of the network's features that take their place, so that the head is
    one of a Gaussian kernel; drawn from the seed. 0 leaves features as they are."""
    trains: Literal["head", "last-block", "lora", "all"] = "head"
    """What local training changes: ``head``, ``last-block`` (the head and the network's last part),
    ``lora`` (the head and low-rank updates of all dense and convolutional layers) or ``all``. The
    network's batch normalisation keeps its statistics."""
    rank: Annotated[int, Field(ge=1, le=1024)] = 8
    """Rank of the updates of ``lora``: the more, the more is trained and sent."""

    @field_validator("network")
    @classmethod
    def _names_its_package(cls, network: str) -> str:
        if network and not re.fullmatch(r"[^:\s]+:[^:\s]+", network):
            raise ValueError(
                "must be timm:NAME, torchvision:NAME or module:Class, as in timm:resnet18"
            )
        return network

    @field_validator("mean", "std", "interpolation")
    @classmethod
    def _is_for_a_network(cls, value: str, info: ValidationInfo) -> str:
        if value and not info.data.get("network", "-"):
            raise ValueError("needs backbone.network, as in timm:resnet18")
        return value

    @field_validator("mean", "std")
    @classmethod
    def _has_a_number_a_channel(cls, numbers: str, info: ValidationInfo) -> str:
        least = 1e-6 if info.field_name == "std" else 0.0
        try:
            found = _numbers(numbers)
            if numbers and (len(found) not in (1, 3) or not all(least <= n <= 1 for n in found)):
                raise ValueError
        except ValueError:
            raise ValueError(
                "must be 1 or 3 numbers up to 1, with commas between, as in 0.485,0.456,0.406"
            ) from None
        return numbers

    def numbers(self, name: Literal["mean", "std"]) -> tuple[float, ...]:
        """Those of ``mean`` or ``std``, by channel; empty if it is not set."""
        return _numbers(self.mean if name == "mean" else self.std)


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(number) for number in text.split(",")) if text else ()
