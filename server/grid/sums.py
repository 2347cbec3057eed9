"""A secure sum: its masks, its mean, and which nodes may have made it fail."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from logging import WARNING
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from flwr.app import RecordDict
from flwr.common import log
from numpy.typing import NDArray

from flwr_distill.base.text import counted
from flwr_distill.links.masks import (
    MAX_VALUE,
    MAX_WEIGHT,
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
from flwr_distill.strategies.common.retries import Retries


class Blame:
    """Nodes that secure sums exclude.

    A proven liar is excluded until the run ends. A node that may be why a sum has failed, such as
    a silent one, is asked again after 1, 2, 4, 8 ... rounds. So a lost connection costs one round,
    and a node that spoils sums spoils ever fewer.
    """

    def __init__(self) -> None:
        self._lies: dict[int, str] = {}
        self._doubts: dict[int, str] = {}
        self._retries = Retries()

    def state_dict(self) -> dict[str, Any]:
        """Excluded nodes, for a checkpoint."""
        retries = self._retries.state_dict()
        return {"lies": dict(self._lies), "doubts": dict(self._doubts), "retries": retries}

    def load_state_dict(self, state: Mapping[str, Any], returned: Mapping[int, int]) -> None:
        """Take over what a checkpoint has of nodes that are back: their ids by earlier ones."""
        lies, doubts, retries = (
            {returned[node]: own for node, own in state[key].items() if node in returned}
            for key in ("lies", "doubts", "retries")
        )
        self._lies, self._doubts, self._retries = lies, doubts, Retries(retries)

    def lied(self, node: int, reason: str) -> None:
        """Exclude a node until the run ends."""
        if node not in self._lies:
            log(WARNING, "Secure sums continue without node %d: %s", node, reason)
            self._lies[node] = reason

    def doubted(self, nodes: Iterable[int], server_round: int, reason: str) -> None:
        """Pause nodes that may be why a sum has failed in this round."""
        for node in nodes:
            if node not in self._lies and self._retries.due(node, server_round):
                self._retries.failed(node, server_round)
                self._doubts[node] = reason

    def excluded(self, nodes: Collection[int], server_round: int, min_left: int) -> dict[int, str]:
        """Why a round's sums exclude some of these nodes, by node.

        Pauses end early where fewer than `min_left` nodes would be left.
        """
        lies = {node: self._lies[node] for node in nodes if node in self._lies}
        pausing = {
            node: f"it pauses, since an earlier sum has failed: {self._doubts[node]}"
            for node in nodes
            if node not in lies and not self._retries.due(node, server_round)
        }
        return lies if len(nodes) - len(lies) - len(pausing) < min_left else lies | pausing


class SumError(RuntimeError):
    """A secure sum has failed and stays masked; `doubts` are nodes that may be why."""

    def __init__(self, reason: str, doubts: Iterable[int] = ()) -> None:
        super().__init__(reason)
        self.doubts = set(doubts)


@dataclass(frozen=True)
class Sum:
    """A secure sum that is not complete."""

    peers: Peers
    context: bytes  # what masks depend on
    needed: int  # shares of a secret that open it
    shares: Mapping[int, Shares]  # by place of the node that shared its secrets
    most: int  # samples of a node that count

    @property
    def members(self) -> list[int]:
        """Places of the nodes that shared their secrets, in order."""
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
    """Shares of a member's secret that have the digests it published, by helper."""
    position, shared = the_sum.members.index(place), the_sum.shares[place]
    digests = shared.seed_digests if place in survivors else shared.key_digests
    return {
        helper: given[position]
        for helper, given in helpers.items()
        if len(given) == len(the_sum.members) and digest(given[position]) == digests[helper]
    }


def max_hostile(num_nodes: int, needed: int) -> int:
    """Nodes of a sum that may be hostile: a node that more than these accuse has lied."""
    return max(num_nodes - needed, 1)


def liars(the_sum: Sum, wrong: Collection[tuple[int, int]]) -> dict[int, str]:
    """Nodes with more wrong shares than hostile others can cause, and the reason.

    `wrong` are pairs of a helper and the member whose share it did not give.
    """
    most = max_hostile(len(the_sum.peers.nodes), the_sum.needed)
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
    """Nodes that may be why masks could not be removed, where no liar explains it."""
    unexplained = {place for place in closed if the_sum.node(place) not in lies}
    if not unexplained:
        return set()
    pairs = {pair for pair in wrong if pair[1] in unexplained}
    honest = {pair for pair in pairs if not any(the_sum.node(place) in lies for place in pair)}
    return {the_sum.node(place) for place in (*silent, *(p for pair in honest for p in pair))}


def mask_of(the_sum: Sum, place: int, survivors: list[int], secret: bytes, size: int) -> Masked:
    """The mask to subtract from a sum for a member: its own, or those that do not cancel.

    Raises ValueError if the secret is not the one that the node has published.
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

    Raises SumError if the masks did not cancel.
    """
    sums = dequantised(total)
    size = sums.size - 1 - 2 * len(SUMMED_METRICS)
    changes, weight, metrics = sums[:size], sums[size], sums[size + 1 :].reshape(-1, 2)
    is_weight = num_nodes <= weight <= MAX_WEIGHT and not weight % 1
    if not (is_weight and (np.abs(changes := changes / weight) <= MAX_VALUE).all()):
        raise SumError("the masks do not cancel: a node added wrong ones")
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
    """The arrays after a change of all their numbers, or the change alone."""
    moved = {}
    for name, array in start.items():
        change, changes = changes[: array.size].reshape(array.shape), changes[array.size :]
        values = change if from_zero else array.astype(np.float64) + change
        if name.rpartition(".")[2] == VARIANCE:
            values = np.maximum(values, 0)  # rounding, where it is next to 0
        whole = array.dtype.kind != "f"  # a count of batches
        moved[name] = (np.rint(values) if whole else values).astype(array.dtype)
    return moved
