"""A secure sum that is opened: what to take off, its mean, and who may be why it stays closed."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from flwr.app import RecordDict
from numpy.typing import NDArray

from flwr_distill.base.text import counted
from flwr_distill.links.masks import (
    LARGEST_VALUE,
    MOST_WEIGHT,
    Masked,
    dequantised,
    digest,
    pair_mask,
    public_bytes,
    stream,
)
from flwr_distill.protocol.arrays import VARIANCE, Arrays
from flwr_distill.protocol.messages import ARRAYS
from flwr_distill.protocol.secure_sums import (
    REFUSED_KEYS,
    SUMMED_METRICS,
    Keys,
    Peers,
    RefusedKeys,
    Shares,
)


class SumError(RuntimeError):
    """A secure sum has failed; what there is of it stays under masks.

    Parameters
    ----------
    reason : str
        For the log.
    doubts : Iterable[int] (default: ())
        Nodes that may be why.
    """

    def __init__(self, reason: str, doubts: Iterable[int] = ()) -> None:
        super().__init__(reason)
        self.doubts = set(doubts)


@dataclass(frozen=True)
class Sum:
    """A secure sum on its way.

    `members` are places of the nodes whose shares the others hold, `shares` what these said of
    them, by place; `context` is what masks depend on, `most` bounds the samples that count.
    """

    peers: Peers
    context: bytes
    needed: int
    shares: Mapping[int, Shares]
    most: int

    @property
    def members(self) -> list[int]:
        """Places, in order."""
        return sorted(self.shares)

    def node(self, place: int) -> int:
        """Flower's id of the node at a place."""
        return int(self.peers.nodes[place])


def unusable_keys(keys: Mapping[int, Keys]) -> dict[int, str]:
    """Nodes with keys that nobody can use, or that others have too, with the reason."""
    published = {node: {of_node.seal_key, of_node.mask_key} for node, of_node in keys.items()}
    counts = Counter(key for both in published.values() for key in both)
    own = X25519PrivateKey.generate()
    lies = {}
    for node, both in published.items():
        for key in both:
            try:
                own.exchange(X25519PublicKey.from_public_bytes(key))
            except ValueError:
                lies[node] = "it published a key that nobody can use"
            if counts[key] > 1:
                lies[node] = "it published a key that another node published too"
    return lies


def refused_keys(
    published: Sequence[int], replies: Mapping[int, RecordDict]
) -> set[tuple[int, int]]:
    """Pairs of a node and another whose keys it refuses."""
    return {
        (node, published[place])
        for node, reply in replies.items()
        if REFUSED_KEYS in reply.config_records
        for place in RefusedKeys.checked(reply.config_records[REFUSED_KEYS], REFUSED_KEYS).places
        if place < len(published)
    }


def shares_of(
    the_sum: Sum,
    place: int,
    survivors: Collection[int],
    helpers: Mapping[int, Sequence[bytes]],
) -> dict[int, bytes]:
    """Shares of a member's secret as the member has told them, by the helper that gave them."""
    position, told = the_sum.members.index(place), the_sum.shares[place]
    digests = told.seed_digests if place in survivors else told.key_digests
    return {
        helper: given[position]
        for helper, given in helpers.items()
        if len(given) == len(the_sum.members) and digest(given[position]) == digests[helper]
    }


def most_hostile(num_nodes: int, needed: int) -> int:
    """Nodes of a sum that may be hostile, so that one whom more accuse has lied."""
    return max(num_nodes - needed, 1)


def liars(the_sum: Sum, wrong: Collection[tuple[int, int]]) -> dict[int, str]:
    """Nodes whose shares differ from what was told more often than hostile others can cause.

    `wrong` are pairs of a helper and the member whose share it did not give.
    """
    most = most_hostile(len(the_sum.peers.nodes), the_sum.needed)
    lies = {}
    for place in the_sum.members:
        given = sum(helper == place for helper, _ in wrong)
        shared = sum(member == place for _, member in wrong)
        if shared > most:
            lies[the_sum.node(place)] = f"{counted(shared, 'share')} of its secrets are no use"
        elif given > most or (place, place) in wrong:
            lies[the_sum.node(place)] = f"it gave {counted(given, 'wrong share')} to open masks"
    return lies


def doubtful(
    the_sum: Sum,
    closed: Collection[int],
    silent: Collection[int],
    wrong: Collection[tuple[int, int]],
    lies: Mapping[int, str],
) -> set[int]:
    """Nodes that may be why masks stay on, where no liar explains it."""
    unexplained = {place for place in closed if the_sum.node(place) not in lies}
    if not unexplained:
        return set()
    pairs = {pair for pair in wrong if pair[1] in unexplained}
    honest = {pair for pair in pairs if not any(the_sum.node(place) in lies for place in pair)}
    return {the_sum.node(place) for place in (*silent, *(p for pair in honest for p in pair))}


def mask_of(the_sum: Sum, place: int, survivors: list[int], secret: bytes, size: int) -> Masked:
    """What is to be taken off a sum for a member: its own mask, or those that do not cancel.

    Raises
    ------
    ValueError
        If the secret is not the one that the node has published.
    """
    peers = the_sum.peers
    if len(secret) != 32:
        raise ValueError("not of 32 bytes")
    if place in survivors:
        if digest(secret) != peers.commitments[place]:
            raise ValueError("not the seed that it was bound to")
        return stream(secret, size)
    key = X25519PrivateKey.from_private_bytes(secret)
    if public_bytes(key) != peers.mask_keys[place]:
        raise ValueError("not the key that it published")
    mask = np.zeros(size, np.uint64)
    for other in survivors:  # minus what it would have added
        mask -= pair_mask(place, other, key, peers.mask_keys[other], the_sum.context, size)
    return mask


def mean_of(
    total: Masked, records: Mapping[str, Arrays], num_nodes: int
) -> tuple[dict[str, Arrays], dict[str, float], int]:
    """Mean arrays by record, mean metrics, and all samples, of a sum of so many nodes.

    Raises
    ------
    SumError
        If the masks did not cancel: a node did not add what it should have.
    """
    sums = dequantised(total)
    size = sums.size - 1 - 2 * len(SUMMED_METRICS)
    changes, weight, metrics = sums[:size], sums[size], sums[size + 1 :].reshape(-1, 2)
    if not num_nodes <= weight <= MOST_WEIGHT or weight % 1:
        raise SumError("the masks do not cancel: a node added others than it should have")
    changes /= weight
    if not (np.abs(changes) <= LARGEST_VALUE).all():
        raise SumError("the masks do not cancel: a node added others than it should have")
    means: dict[str, Arrays] = {}
    for record, arrays in records.items():
        size = sum(array.size for array in arrays.values())
        means[record] = _moved(arrays, changes[:size], from_zero=record != ARRAYS)
        changes = changes[size:]
    numbers: dict[str, float] = {}
    for key, (value, of_weight) in zip(SUMMED_METRICS, metrics.tolist(), strict=True):
        if of_weight:
            numbers[key] = value / of_weight
    return means, numbers, int(weight)


def _moved(start: Arrays, changes: NDArray[np.float64], *, from_zero: bool) -> Arrays:
    """The arrays after a change of all their numbers, or that change itself."""
    moved = {}
    for name, array in start.items():
        change, changes = changes[: array.size].reshape(array.shape), changes[array.size :]
        values = change if from_zero else array.astype(np.float64) + change
        if name.rpartition(".")[2] == VARIANCE:
            values = np.maximum(values, 0)  # rounding, where it is next to 0
        whole = array.dtype.kind != "f"  # a count of batches
        moved[name] = (np.rint(values) if whole else values).astype(array.dtype)
    return moved
