"""What members may send, and heads may claim: no more than was described and requested."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from flwr_distill.distill.formation import MAX_FORMATION
from flwr_distill.distill.virtual_header import Bounds
from flwr_distill.strategies.common.directory import Directory
from flwr_distill.strategies.common.images import chosen_formation
from flwr_distill.strategies.hfldd.requests import Distillation, ParcelBounds


@dataclass(frozen=True)
class Limits:
    """Bounds of parcels and pools."""

    directory: Directory
    distillation: Distillation
    """The request to members."""
    num_classes: int
    image_shape: tuple[int, ...] | None
    """(C, H, W) of the nodes' images; None if unknown."""

    def images(self, member: int) -> int:
        """Images of a member's virtual data, or its samples by its description."""
        if self.distillation.share_raw_data:
            return self._samples(member)
        # At least one image of each class that the node has.
        return max(self.distillation.distilled_size, self.num_classes)

    def of_a_class(self, member: int) -> int:
        """Those of one class."""
        if self.distillation.share_raw_data:
            return self._samples(member)
        return self.distillation.distilled_size

    def parcels(self, members: Collection[int], server_round: int) -> ParcelBounds:
        """What a head takes from any of them in a round."""
        return ParcelBounds(
            images=max(self.images(member) for member in members),
            of_a_class=max(self.of_a_class(member) for member in members),
            formation=self._formation,
            server_round=server_round,
        )

    def num_bytes(self, member: int) -> int | None:
        """Bytes of a member's parcel; None if the shape of images is unknown."""
        if self.image_shape is None:
            return None
        images, of_a_class = self.images(member), self.of_a_class(member)
        return Bounds(self.image_shape, self.num_classes, images, of_a_class).num_bytes

    def num_values(self, member: int) -> float:
        """Numbers in a member's virtual data."""
        if self.image_shape is None:
            return math.inf
        return self.images(member) * math.prod(self.image_shape)

    def pool(
        self, head: int, members: Collection[int], samples: Mapping[int, int], share: float = 1.0
    ) -> float:
        """Samples that a head can train on: its own, and a share of what members may have sent.

        `samples` are those that count of each connected node (`Directory.samples`); a member that
        is gone counts for no more than any of these.
        """
        if head not in samples:
            return math.inf
        if self.distillation.share_raw_data:
            most = max(samples.values())
            received = sum(min(self._samples(member), most) for member in members)
        else:
            received = sum(self.images(member) for member in members) * self._formation**2
        return samples[head] + math.ceil(share * received)

    def _samples(self, member: int) -> int:
        return max(1, self.directory.num_examples.get(member, 1))

    @property
    def _formation(self) -> int:
        """The largest formation with which members distil."""
        formation = self.distillation.formation
        if self.distillation.share_raw_data:
            return 1
        if self.image_shape is None:
            return formation or MAX_FORMATION
        return chosen_formation("hfldd.formation", formation, self.image_shape)
