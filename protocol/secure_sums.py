"""Secure sums: what server and nodes say to each other so that the server sees a sum alone.

Bonawitz et al. 2017, figure 4, in four steps: every node of the phase publishes keys
(:class:`Keys`), shares its secrets with the others (:class:`Shares`), answers the phase's own
message under masks (:class:`SumRequest`, :class:`MaskedMetrics`), and helps to take the masks off
(:class:`Unmasking`, :class:`Unmasked`). Secrets are for one sum.
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from functools import lru_cache, partial
from typing import Annotated, Any, Self

import numpy as np
from flwr.app import ArrayRecord, RecordDict
from numpy.typing import NDArray
from pydantic import Field, create_model, model_validator

from flwr_distill.links.masks import MAX_NODES, MIN_NODES
from flwr_distill.links.records import NodeId, Peered, Printable, PublicKey
from flwr_distill.protocol.arrays import Arrays, as_arrays
from flwr_distill.protocol.messages import (
    ARRAYS,
    NUM_EXAMPLES,
    NUM_STEPS,
    TOGETHER,
    TRAIN_ACCURACY,
    TRAIN_LOSS,
)
from flwr_distill.protocol.method import Phase
from flwr_distill.protocol.schema import Reply, Request
from flwr_distill.task.columns import Scale
from flwr_distill.task.settings import Block

ANNOUNCE = "query.secure_keys"
SHARE = "query.secure_shares"
UNMASK = "query.secure_unmask"

SECURE = "secure-sum"
"""Record of messages and replies of a secure sum; that of a train message asks for masks."""
MASKED = "masked"
"""Record with a node's masked numbers, and the name of its only array."""
SUMMED_METRICS = (TRAIN_LOSS, TRAIN_ACCURACY)
"""Metrics that are summed under the masks with the model and the number of samples."""
UNTOLD = {NUM_EXAMPLES, NUM_STEPS, *SUMMED_METRICS}
"""Metrics that a masked reply must not contain."""
REFUSED_KEYS = "refused-keys"
"""Record of the answer of a node that does not share its secrets, because of others' keys."""
MAX_SHARE = 64
MAX_SEALED = 256

Number = Annotated[int, Field(ge=1, le=2**53)]
Place = Annotated[int, Field(ge=0, lt=MAX_NODES)]
Places = Annotated[list[Place], Field(max_length=MAX_NODES)]
Sealed = Annotated[bytes, Field(max_length=MAX_SEALED)]
Digest = Annotated[bytes, Field(min_length=32, max_length=32)]
Share = Annotated[bytes, Field(max_length=MAX_SHARE)]


def _per_node(item: Any, least: int = 1) -> Any:
    return Annotated[list[item], Field(min_length=least, max_length=MAX_NODES)]


class Announcement(Block):
    """The server's first message of a sum."""

    number: Number
    """Larger than that of any earlier sum of the run."""


class Keys(Block):
    """A node's public keys for one sum."""

    seal_key: PublicKey
    """X25519, for shares that others send it."""
    mask_key: PublicKey
    """X25519, for masks."""
    commitment: Digest
    """SHA-256 of the seed of its own mask."""
    certificate: Annotated[bytes, Field(max_length=2**16)] = b""
    """PEM, as in :class:`links.records.Introduction`."""
    signature: Annotated[bytes, Field(max_length=1024)] = b""
    """Of :func:`keys_digest`, run and node."""


class Peers(Block):
    """All nodes of a sum with their keys, in the order of their places."""

    number: Number
    nodes: _per_node(NodeId, MIN_NODES)  # type: ignore[valid-type]
    names: _per_node(Annotated[Printable, Field(max_length=64)])  # type: ignore[valid-type]
    seal_keys: _per_node(PublicKey)  # type: ignore[valid-type]
    mask_keys: _per_node(PublicKey)  # type: ignore[valid-type]
    commitments: _per_node(Digest)  # type: ignore[valid-type]
    certificates: _per_node(bytes)  # type: ignore[valid-type]
    signatures: _per_node(bytes)  # type: ignore[valid-type]

    @model_validator(mode="after")
    def _are_distinct_nodes(self) -> Self:
        columns = [values for values in self.__dict__.values() if isinstance(values, list)]
        if len({len(column) for column in columns}) > 1:
            raise ValueError("its lists are not of one length")
        for column in (self.nodes, self.seal_keys, self.mask_keys):
            if len(set(column)) < len(column):
                raise ValueError("a node or a key is in it twice")
        return self

    def view(self, run_id: int) -> bytes:
        """SHA-256 of run, sum, nodes and keys: what all nodes of a sum must have seen alike."""
        keys = [*self.seal_keys, *self.mask_keys, *self.commitments]
        fields = ["flwr-distill/sum/1", str(run_id), self.number, *self.nodes]
        return hashlib.sha256(json.dumps([*fields, *(key.hex() for key in keys)]).encode()).digest()

    def signed(self, place: int) -> Peered:
        """The keys at a place as a certificate's signature covers them."""
        own = (self.seal_keys[place], self.mask_keys[place], self.commitments[place])
        return Peered(
            sender=self.nodes[place],
            receiver=self.nodes[place],
            purpose=SECURE,
            token="0" * 32,
            peer_key=keys_digest(self.number, *own),
            peer_name=self.names[place],
            peer_certificate=self.certificates[place],
            peer_signature=self.signatures[place],
        )


class Shares(Block):
    """Shares of a node's secrets, in the order of places; its own are empty."""

    sealed: _per_node(Sealed)  # type: ignore[valid-type]
    """A share of the mask key and one of the own mask's seed, for each node."""
    key_digests: _per_node(Digest)  # type: ignore[valid-type]
    """SHA-256 of the shares of the mask key, so that the server knows a wrong one."""
    seed_digests: _per_node(Digest)  # type: ignore[valid-type]
    """The same of the shares of the seed."""


class RefusedKeys(Block):
    """Places of nodes whose keys this node does not take; it says why in its own log."""

    places: Annotated[list[Place], Field(min_length=1, max_length=MAX_NODES)]


class SumRequest(Block):
    """What a phase's own message says besides when its answers are summed."""

    number: Number
    """The sum's."""
    members: Places
    """Places of the nodes that have shared their secrets."""
    sealed: Annotated[list[Sealed], Field(max_length=MAX_NODES)]
    """Their shares for this node, in the same order."""
    longest: Annotated[float, Field(gt=0)]
    """L2 norm to which a longer update is shortened; the same for all nodes."""
    most: Annotated[int, Field(ge=0)] = 0
    """Samples of a node that count at most; the same for all nodes, 0 for no bound."""

    @model_validator(mode="after")
    def _are_shares_of_members(self) -> Self:
        if len(self.members) != len(self.sealed):
            raise ValueError("its lists are not of one length")
        return self


class Unmasking(Block):
    """The last message of a sum: places of the nodes whose masked numbers the server has."""

    number: Number
    survivors: Places


class Unmasked(Block):
    """A share for each member, in their order: of a survivor's seed, or of another's mask key.

    One that the node does not have is empty.
    """

    shares: _per_node(Share)  # type: ignore[valid-type]


def waybill(view: bytes, sender: str, receiver: str, peer_key: bytes) -> Peered:
    """Waybill of the shares that one node seals for another; `peer_key` is the other end's.

    They open only for nodes that have seen the same keys of all (`Peers.view`).
    """
    token = view.hex()[:32]
    return Peered(sender=sender, receiver=receiver, purpose=SECURE, token=token, peer_key=peer_key)


def keys_digest(number: int, seal_key: bytes, mask_key: bytes, commitment: bytes) -> bytes:
    """SHA-256 of a node's keys for one sum: what it signs, as it signs its key for links."""
    keys = [seal_key.hex(), mask_key.hex(), commitment.hex()]
    return hashlib.sha256(json.dumps(["flwr-distill/keys/1", number, *keys]).encode()).digest()


def told_alike(content: RecordDict, own: Collection[str]) -> dict[str, Any]:
    """What must be the same in messages to all nodes of a sum, by record: all but `own`."""
    return {
        name: record
        if isinstance(record, ArrayRecord)
        else {key: value for key, value in record.items() if f"{name}.{key}" not in own}
        for name, record in content.items()
        if name not in (SECURE, TOGETHER)
    }


def context_of(
    view: bytes,
    content: RecordDict,
    phase: Phase,
    run_config: Mapping[str, Any],
    bounds: tuple[float, int],
    scale: Scale | None,
) -> bytes:
    """What masks depend on: view, the phase's message, run config, the sum's bounds, and the scale.

    A server that sends single nodes something else (another model, a learning rate of 0, a term
    that outweighs the loss, lower bounds, at the meeting a scale at which all values are 0) gets a
    sum whose masks do not cancel; else it could make all but one update vanish (Pasquini et al.
    2022, "Eluding secure aggregation in federated learning via model inconsistency").
    """
    columns = [] if scale is None else [asdict(scale)]
    common = json.dumps([sorted(run_config.items()), *bounds, *columns])
    checksum = hashlib.sha256(view + common.encode())
    for name, record in sorted(told_alike(content, phase.own).items()):
        if not isinstance(record, ArrayRecord):
            values = json.dumps([name, sorted(record.items())], default=bytes.hex)
            checksum.update(values.encode())
            continue
        for key, array in sorted(as_arrays(record).items()):
            checksum.update(json.dumps([name, key, array.dtype.str, array.shape]).encode())
            checksum.update(np.ascontiguousarray(array).tobytes())
    return checksum.digest()


def summed_records(phase: Phase, content: RecordDict, model: Arrays) -> Mapping[str, Arrays]:
    """Array records of the answers to a message that are summed: arrays like theirs, by name."""
    return phase.summed(content, model) if phase.summed else {ARRAYS: model}


def num_masked(records: Mapping[str, Arrays]) -> int:
    """Numbers in a masked reply: records, weight, each metric and the weight that has it."""
    sizes = (array.size for arrays in records.values() for array in arrays.values())
    return sum(sizes) + 1 + 2 * len(SUMMED_METRICS)


def like_masked_models(record: ArrayRecord, model: Arrays, *, most: int) -> None:
    """Check that a record contains 64-bit integers, enough for a model, and for `most` at most."""
    array, fewest = masked_in(record), num_masked({ARRAYS: model})
    others = (most - 1) * sum(values.size for values in model.values())
    if not fewest <= array.size <= fewest + others:
        wanted = f"{fewest}" if most == 1 else f"{fewest} to {fewest + others}"
        raise ValueError(f"{MASKED} is {array.dtype} {array.shape}, needs uint64 ({wanted},)")


def masked_in(record: ArrayRecord) -> NDArray[Any]:
    """The masked numbers in a record.

    Raises ValueError if it contains anything else.
    """
    arrays = as_arrays(record)
    if list(arrays) != [MASKED]:
        raise ValueError(f"its arrays are not {MASKED}")
    array = arrays[MASKED]
    if array.dtype.str != "<u8" or array.ndim != 1:
        raise ValueError(f"{MASKED} is {array.dtype} {array.shape}, needs uint64 (n,)")
    return array


def _like_masked_numbers(record: ArrayRecord, model: Arrays) -> None:
    """Check that a record contains 64-bit integers; how many there must be is known to the sum."""
    masked_in(record)


def in_secure_sums(phase: Phase) -> Phase:
    """A phase whose answers are masked: only sums of arrays are known.

    Answers without arrays stay unchanged.
    """
    replies = tuple(_masked(reply) if reply.arrays else reply for reply in phase.replies)
    request = phase.request and phase.request.plus({SECURE: SumRequest})
    leaves = f"under masks: {phase.leaves}"
    return replace(phase, replies=replies, request=request, leaves=leaves, single=False)


def _masked(reply: Reply) -> Reply:
    check = _like_masked_numbers
    if ARRAYS in reply.arrays:
        check = partial(like_masked_models, most=len(reply.arrays))
    return Reply(metrics=_shown_of(reply.metrics), arrays={MASKED: check})


@lru_cache(maxsize=64)
def _shown_of(metrics: type[Block]) -> type[Block]:
    """The metrics that a masked answer has."""
    shown: Mapping[str, Any] = {
        name: (field.rebuild_annotation(), field)
        for name, field in metrics.model_fields.items()
        if (field.alias or name) not in UNTOLD
    }
    return create_model(f"Masked{metrics.__name__}", __base__=Block, **shown)


PHASES = (
    Phase(
        ANNOUNCE,
        "nodes publish keys for a secure sum",
        (Reply(configs={SECURE: Keys}),),
        "flwr_distill.client.secure_sums:announce",
        request=Request({SECURE: Announcement}),
    ),
    Phase(
        SHARE,
        "nodes share their masks' secrets",
        (Reply(configs={SECURE: Shares}), Reply(configs={REFUSED_KEYS: RefusedKeys})),
        "flwr_distill.client.secure_sums:share",
        request=Request({SECURE: Peers}),
    ),
    Phase(
        UNMASK,
        "nodes take the masks off the sum",
        (Reply(configs={SECURE: Unmasked}),),
        "flwr_distill.client.secure_sums:unmask",
        request=Request({SECURE: Unmasking}),
    ),
)
