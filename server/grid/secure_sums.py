"""Flower Grid that sees the sum of the models that nodes train, and no single one.

Strategies notice nothing: each node's reply holds the mean of all, and the weighted mean of equal
models is that mean. The protocol is in `protocol.secure_sums`, its maths in `links.masks`.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from logging import ERROR
from typing import Any, TypeVar

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from flwr.app import ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common import log
from numpy.typing import NDArray

from links.credentials import name_of
from links.masks import (
    FEWEST,
    LARGEST_VALUE,
    MOST,
    MOST_WEIGHT,
    Masked,
    dequantised,
    digest,
    opened,
    pair_mask,
    public_bytes,
    stream,
    threshold,
)
from protocol.arrays import VARIANCE, Arrays, as_arrays, as_record
from protocol.messages import ARRAYS, METRICS, NUM_EXAMPLES
from protocol.replies import SET_ASIDE
from protocol.secure_sums import (
    ANNOUNCE,
    MASKED,
    SECURE,
    SHARE,
    SUMMED_METRICS,
    UNMASK,
    Announcement,
    Keys,
    Peers,
    Shares,
    SumRequest,
    Unmasked,
    Unmasking,
    context_of,
    training_settings,
)
from server.grid.screening import ScreeningGrid
from task.settings import Block
from task.words import counted

B = TypeVar("B", bound=Block)


class SumError(RuntimeError):
    """A secure sum has failed; what there is of it stays under masks."""


@dataclass(frozen=True)
class _Sum:
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
        return sorted(self.shares)

    def node(self, place: int) -> int:
        return int(self.peers.nodes[place])


class SecureSumGrid(ScreeningGrid):
    """Screening grid whose phases with `summed` messages are secure sums.

    A sum goes on without the nodes that are lost, at any step, as long as two thirds are left. A
    sum that fails is a phase in which no node sends anything usable.

    Parameters
    ----------
    *args, **kwargs
        See :class:`server.grid.screening.ScreeningGrid`.
    summed : Collection[str]
        Message types.
    longest : float
        L2 norm to which nodes shorten a longer update.
    run_id : int
        Flower's.
    """

    def __init__(
        self, *args: Any, summed: Collection[str], longest: float, run_id: int, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._summed = summed
        self._longest = longest
        self._run_id = run_id
        self._number = 0
        self._seconds = 0.0
        """What the masked answers have taken."""
        self._begun_with = 0

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Have a phase's answers summed if they are models; see `MeteredGrid`."""
        messages = list(messages)
        if not messages or messages[0].metadata.message_type not in self._summed:
            return super().send_and_receive(messages, timeout=timeout)
        try:
            return self._secure_sum(messages, timeout)
        except SumError as error:
            return self._failed(messages, f"the secure sum has failed: {error}")

    def _secure_sum(self, messages: list[Message], timeout: float | None) -> list[Message]:
        self._seconds, self._begun_with = 0.0, len(messages)
        if not FEWEST <= len(messages) <= MOST:
            raise SumError(
                f"{counted(len(messages), 'node')} asked, and it takes {FEWEST} to {MOST} "
                "(start more nodes, lower fraction-train, or set secure-sums to false)"
            )
        start = self._common_start(messages)
        the_sum = self._agreed(messages, timeout)
        by_node = {message.metadata.dst_node_id: message for message in messages}
        asked = self._masking_messages(the_sum, by_node)
        replies = super().send_and_receive(asked, timeout=timeout)
        masked = {r.metadata.src_node_id: r.content for r in replies if r.has_content()}
        survivors = [place for place in the_sum.members if the_sum.node(place) in masked]
        total = self._unmasked(the_sum, survivors, masked, timeout)
        mean, numbers = _mean(total, start, len(survivors))
        answers = [
            Message(_content(mean, numbers, masked[node]), reply_to=message)
            for message in asked
            if (node := message.metadata.dst_node_id) in masked
        ]
        phase = messages[0].metadata.message_type
        super()._book_phase(phase, self._seconds, len(messages), answers)
        return [*answers, *(reply for reply in replies if reply.has_error())]

    def _book_phase(self, phase: str, seconds: float, asked: int, replies: list[Message]) -> None:
        """Record a phase; that with masked answers, which hold no numbers, later."""
        if phase in self._summed:
            self._seconds = seconds
        else:
            super()._book_phase(phase, seconds, asked, replies)

    def _check_quorum(
        self, phase: str, replies: list[Message], num_nodes: int, wait: float
    ) -> None:
        """Check the quorum, of all nodes that a sum began with."""
        of = self._begun_with if phase in self._summed else num_nodes
        super()._check_quorum(phase, replies, of, wait)

    def _common_start(self, messages: list[Message]) -> Arrays:
        """The model that all of a sum's nodes start from."""
        first, *others = [message.content for message in messages]
        model = first.array_records.get(ARRAYS)
        if model is None or any(
            other.array_records.get(ARRAYS) is not model
            or training_settings(other) != training_settings(first)
            for other in others
        ):
            raise SumError("the strategy does not send all nodes the same model and settings")
        return self._start_of(messages[0])

    def _agreed(self, messages: list[Message], timeout: float | None) -> _Sum:
        """Have the nodes publish keys and share their secrets."""
        self._number += 1
        nodes = [message.metadata.dst_node_id for message in messages]
        announcement = _content_of(Announcement(number=self._number))
        keys = self._answers(ANNOUNCE, dict.fromkeys(nodes, announcement), Keys, timeout)
        if len(keys) < max(FEWEST, threshold(len(nodes))):
            raise SumError(f"{len(keys)} of {counted(len(nodes), 'node')} published keys")
        try:
            peers = Peers(
                number=self._number,
                nodes=[str(node) for node in keys],
                names=[name_of(of_node.certificate) for of_node in keys.values()],
                seal_keys=[of_node.seal_key for of_node in keys.values()],
                mask_keys=[of_node.mask_key for of_node in keys.values()],
                commitments=[of_node.commitment for of_node in keys.values()],
                certificates=[of_node.certificate for of_node in keys.values()],
                signatures=[of_node.signature for of_node in keys.values()],
            )
        except ValueError as error:
            raise SumError(f"nodes published the same keys: {error}") from None
        answers = self._answers(SHARE, dict.fromkeys(keys, _content_of(peers)), Shares, timeout)
        shares = {
            place: answers[node]
            for place, node in enumerate(keys)
            if node in answers and _are_complete(answers[node], len(keys))
        }
        needed = threshold(len(keys))
        if len(shares) < needed:
            raise SumError(
                f"{len(shares)} of {counted(len(keys), 'node')} shared their secrets, and it needs "
                f"{needed}"
            )
        first, most = messages[0], self._most_samples(messages)
        view = peers.view(self._run_id)
        context = context_of(view, first.content, self._longest, most)
        return _Sum(peers, context, needed, shares, most)

    def _most_samples(self, messages: list[Message]) -> int:
        """Most samples of a node that count, as in a run without secure sums; 0 for no bound."""
        if self._phases[messages[0].metadata.message_type].pooled:
            return 0
        nodes = {message.metadata.dst_node_id for message in messages}
        return max(self._directory.samples({*self.get_node_ids(), *nodes}).values(), default=0)

    def _masking_messages(self, the_sum: _Sum, by_node: Mapping[int, Message]) -> list[Message]:
        """The phase's messages, to the members of the sum, with what they need for their masks."""
        first = next(iter(by_node.values())).metadata.message_type
        messages = []
        for place in the_sum.members:
            node = the_sum.node(place)
            message = by_node[node]
            request = SumRequest(
                number=self._number,
                members=the_sum.members,
                sealed=[the_sum.shares[member].sealed[place] for member in the_sum.members],
                longest=self._longest,
                most=the_sum.most,
            )
            content = RecordDict({**message.content, **_content_of(request)})
            about = message.metadata
            messages.append(Message(content, node, first, ttl=about.ttl, group_id=about.group_id))
        return messages

    def _unmasked(
        self,
        the_sum: _Sum,
        survivors: list[int],
        masked: Mapping[int, RecordDict],
        timeout: float | None,
    ) -> Masked:
        """The sum of the survivors' numbers."""
        members, needed = the_sum.members, the_sum.needed
        if len(survivors) < needed:
            raise SumError(
                f"{len(survivors)} of {counted(len(members), 'node')} sent masked models, and it "
                f"needs {needed}"
            )
        content = _content_of(Unmasking(number=self._number, survivors=survivors))
        asked = {the_sum.node(place): content for place in survivors}
        answers = self._answers(UNMASK, asked, Unmasked, timeout)
        helpers = {
            place: answers[node].shares
            for place in survivors
            if (node := the_sum.node(place)) in answers
            and len(answers[node].shares) == len(members)
        }
        total = np.zeros((), np.uint64)
        for place in survivors:
            (array,) = as_arrays(masked[the_sum.node(place)].array_records[MASKED]).values()
            total = total + array.astype(np.uint64)
        for position, place in enumerate(members):
            told = the_sum.shares[place]
            digests = told.seed_digests if place in survivors else told.key_digests
            shares = [
                held[position]
                for helper, held in helpers.items()
                if digest(held[position]) == digests[helper]
            ]
            try:
                secret = opened(shares, needed)
            except ValueError as error:
                raise SumError(
                    f"the masks of node {the_sum.node(place)} stay on: {error}"
                ) from None
            total -= _mask(the_sum, place, survivors, secret, total.size)
        return total

    def _answers(
        self,
        message_type: str,
        contents: Mapping[int, RecordDict],
        kind: type[B],
        timeout: float | None,
    ) -> dict[int, B]:
        """Usable answers of a step by node, in the order of the nodes."""
        messages = [Message(content, node, message_type) for node, content in contents.items()]
        replies = super().send_and_receive(messages, timeout=timeout)
        return {
            reply.metadata.src_node_id: kind.checked(reply.content.config_records[SECURE], SECURE)
            for reply in replies
            if reply.has_content()
        }

    def _failed(self, messages: list[Message], reason: str) -> list[Message]:
        phase = messages[0].metadata.message_type
        log(ERROR, "%s: %s", phase, reason)
        super()._book_phase(phase, self._seconds, len(messages), [])
        self.answered[phase] = False
        for message in messages:
            self.failures.setdefault(message.metadata.dst_node_id, []).append(reason)
        return [Message(Error(SET_ASIDE, reason), reply_to=message) for message in messages]


def _mask(the_sum: _Sum, place: int, survivors: list[int], secret: bytes, size: int) -> Masked:
    """What is to be taken off a sum for a member: its own mask, or those that do not cancel.

    Raises
    ------
    SumError
        If the secret is not the one that the node has published.
    """
    peers = the_sum.peers
    lie = SumError(f"node {peers.nodes[place]} shared something else than it published")
    if place in survivors:
        if len(secret) != 32 or digest(secret) != peers.commitments[place]:
            raise lie
        return stream(secret, size)
    if len(secret) != 32:
        raise lie
    key = X25519PrivateKey.from_private_bytes(secret)
    if public_bytes(key) != peers.mask_keys[place]:
        raise lie
    mask = np.zeros(size, np.uint64)
    for other in survivors:  # minus what it would have added
        mask -= pair_mask(place, other, key, peers.mask_keys[other], the_sum.context, size)
    return mask


def _mean(total: Masked, start: Arrays, num_nodes: int) -> tuple[Arrays, dict[str, int | float]]:
    """Mean model and metrics of a sum, the samples as those of one of so many equal nodes.

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
    mean: dict[str, NDArray[Any]] = {}
    for (name, array), change in zip(start.items(), _split(changes, start), strict=True):
        moved = array.astype(np.float64) + change
        if name.rpartition(".")[2] == VARIANCE:
            moved = np.maximum(moved, 0)  # rounding, where it is next to 0
        whole = array.dtype.kind != "f"  # a count of batches
        mean[name] = (np.rint(moved) if whole else moved).astype(array.dtype)
    numbers: dict[str, int | float] = {NUM_EXAMPLES: max(1, round(weight / num_nodes))}
    for key, (value, of_weight) in zip(SUMMED_METRICS, metrics.tolist(), strict=True):
        if of_weight:
            numbers[key] = value / of_weight
    return mean, numbers


def _split(changes: NDArray[np.float64], like: Arrays) -> Iterable[NDArray[np.float64]]:
    ends = np.cumsum([array.size for array in like.values()])
    for array, end in zip(like.values(), ends, strict=True):
        yield changes[end - array.size : end].reshape(array.shape)


def _content(mean: Arrays, numbers: Mapping[str, int | float], masked: RecordDict) -> RecordDict:
    """A node's answer with the mean in place of what is masked."""
    metrics = masked.metric_records.get(METRICS, MetricRecord())
    return RecordDict({ARRAYS: as_record(mean), METRICS: MetricRecord({**metrics, **numbers})})


def _content_of(block: Block) -> RecordDict:
    return RecordDict({SECURE: ConfigRecord(block.model_dump(by_alias=True))})


def _are_complete(shares: Shares, num_nodes: int) -> bool:
    lists = (shares.sealed, shares.key_digests, shares.seed_digests)
    return all(len(each) == num_nodes for each in lists)
