"""What members may send, and what a head may claim: no more than was told and asked for."""

import math
from collections.abc import Collection
from dataclasses import dataclass

from distill.formation import LARGEST
from distill.virtual_data import Bounds
from protocol.hfldd import Distillation, ParcelBounds
from strategies.common.directory import Directory
from strategies.common.formation import chosen_formation


@dataclass(frozen=True)
class Limits:
    """Bounds of parcels and pools.

    Parameters
    ----------
    directory : Directory
        Knows how many samples nodes said that they have.
    distillation : Distillation
        What members are asked for.
    num_classes : int
        Classes of the task.
    image_shape : tuple of int, optional
        (C, H, W) of the nodes' images; None if unknown.
    """

    directory: Directory
    distillation: Distillation
    num_classes: int
    image_shape: tuple[int, ...] | None

    def parcel(self, member: int) -> ParcelBounds:
        """Images of a member's virtual data, or of as many samples as it said it has."""
        if self.distillation.share_raw_data:
            samples = max(1, self.directory.num_examples.get(member, 1))
            return ParcelBounds(images=samples, of_a_class=samples)
        size = self.distillation.distilled_size
        # At least one image of each class that the node holds.
        return ParcelBounds(
            images=max(size, self.num_classes), of_a_class=size, formation=self._formation
        )

    def parcels(self, members: Collection[int]) -> ParcelBounds:
        """Images of any member's."""
        each = [self.parcel(member) for member in members]
        return ParcelBounds(
            images=max(one.images for one in each),
            of_a_class=max(one.of_a_class for one in each),
            formation=max(one.formation for one in each),
        )

    def num_bytes(self, member: int) -> int | None:
        """Bytes of a member's parcel; None if the shape of images is unknown."""
        if self.image_shape is None:
            return None
        most = self.parcel(member)
        return Bounds(self.image_shape, self.num_classes, most.images, most.of_a_class).num_bytes

    def num_values(self, member: int) -> float:
        """Numbers in a member's virtual data."""
        if self.image_shape is None:
            return math.inf
        return self.parcel(member).images * math.prod(self.image_shape)

    def pool(self, head: int, members: Collection[int], nodes: Collection[int]) -> float:
        """Samples that a head can train on: its own, and what members may have sent.

        `nodes` are all that are known, among which those of one count at most ``most_samples``
        times the median.
        """
        samples = self.directory.samples(nodes)
        if head not in samples:
            return math.inf
        if self.distillation.share_raw_data:
            return samples[head] + sum(samples[member] for member in members)
        parcels = [self.parcel(member) for member in members]
        return samples[head] + sum(each.images * each.formation**2 for each in parcels)

    @property
    def _formation(self) -> int:
        """The largest formation with which members distil."""
        formation = self.distillation.formation
        if self.image_shape is None:
            return formation or LARGEST
        return chosen_formation("hfldd.formation", formation, self.image_shape)
