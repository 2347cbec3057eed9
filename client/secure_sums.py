"""A node's part in secure sums: keys, shares, masks, and the help to take masks off.

Secrets are made for one sum, stored between its messages, and deleted before the node gives shares
away. Whatever the server says, a node refuses a second use of keys, a second reply and too few
nodes.
"""

import json
import math
import secrets
from collections import defaultdict
from collections.abc import Callable, Mapping
from logging import WARNING
from typing import Any, TypeVar

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.common import log
from numpy.typing import NDArray

from flwr_distill.client.session import kept_scale, store_of
from flwr_distill.links import LinkError
from flwr_distill.links.credentials import Credentials
from flwr_distill.links.masks import (
    MAX_WEIGHT,
    Masked,
    digest,
    pair_mask,
    public_bytes,
    quantised,
    stream,
    threshold,
)
from flwr_distill.links.seal import seal, unseal
from flwr_distill.links.shares import create_shares
from flwr_distill.protocol.arrays import Arrays, as_arrays
from flwr_distill.protocol.messages import ARRAYS, METRICS, NUM_EXAMPLES
from flwr_distill.protocol.method import Phase
from flwr_distill.protocol.outliers import update_norm
from flwr_distill.protocol.registry import find_method, phases_of, summed_in
from flwr_distill.protocol.secure_sums import (
    MASKED,
    REFUSED_KEYS,
    SECURE,
    SUMMED_METRICS,
    UNTOLD,
    Announcement,
    Keys,
    Peers,
    RefusedKeys,
    Shares,
    SumRequest,
    Unmasked,
    Unmasking,
    context_of,
    keys_digest,
    summed_records,
    waybill,
)
from flwr_distill.storage.store import NodeStore
from flwr_distill.task.errors import ReportedError
from flwr_distill.task.settings import Block

B = TypeVar("B", bound=Block)

FOLDER = "links/sums"
"""Folder among a node's files for links, which go when the run ends."""
STATE = "sum"
"""File with the node's last sum: number, step, and secrets while they are needed."""


class SumRefusedError(ReportedError, RuntimeError):
    """A node refuses a message of a secure sum."""


def announce(message: Message, context: Context) -> Message:
    """Make the keys of a new sum, and publish them."""
    number, files = _request(message, Announcement).number, _files(context)
    earlier = _state_of(files)["number"]
    if number <= earlier:
        raise SumRefusedError(f"sum {number} is not newer than this node's last one")
    seal_key, mask_key = X25519PrivateKey.generate(), X25519PrivateKey.generate()
    seed = secrets.token_bytes(32)
    own = public_bytes(seal_key), public_bytes(mask_key), digest(seed)
    certificate, signature = b"", b""
    if credentials := Credentials.of(context.node_config):
        certificate = credentials.certificate
        statement = keys_digest(number, *own)
        signature = credentials.sign(statement, context.run_id, context.node_id)
    elif not earlier:
        log(
            WARNING,
            "This node has no --peer-certificate: its secure sums protect against a curious "
            "server, not against one that distributes keys of its own making",
        )
    _write(
        files,
        number=number,
        step="announced",
        seal_key=seal_key.private_bytes_raw().hex(),
        mask_key=mask_key.private_bytes_raw().hex(),
        seed=seed.hex(),
    )
    keys = Keys(
        seal_key=own[0],
        mask_key=own[1],
        commitment=own[2],
        certificate=certificate,
        signature=signature,
    )
    return _reply(message, keys)


def share(message: Message, context: Context) -> Message:
    """Share the secrets of a sum with its other nodes, sealed for each."""
    peers, files = _request(message, Peers), _files(context)
    state = _state(files, peers.number, "announced")
    seal_key = _key(state["seal_key"])
    own = str(context.node_id), public_bytes(seal_key), public_bytes(_key(state["mask_key"]))
    try:
        place = list(zip(peers.nodes, peers.seal_keys, peers.mask_keys, strict=True)).index(own)
    except ValueError:
        raise SumRefusedError("this node's own keys are not among those of the sum") from None
    if refused := _refused_keys(peers, context):
        return _reply(message, RefusedKeys(places=refused), REFUSED_KEYS)
    view, num_nodes = peers.view(context.run_id), len(peers.nodes)
    key_shares, seed_shares = (
        create_shares(bytes.fromhex(state[secret]), threshold(num_nodes), num_nodes)
        for secret in ("mask_key", "seed")
    )
    _write(
        files,
        **{key: state[key] for key in ("number", "seal_key", "mask_key", "seed")},
        step="shared",
        place=place,
        view=view.hex(),
        nodes=peers.nodes,
        seal_keys=[key.hex() for key in peers.seal_keys],
        mask_keys=[key.hex() for key in peers.mask_keys],
        own_shares=[key_shares[place].hex(), seed_shares[place].hex()],
    )
    sealed = [
        seal(
            key_share + seed_share,
            waybill(view, own[0], peers.nodes[other], peers.seal_keys[other]),
            context.run_id,
            seal_key,
        )
        if other != place
        else b""
        for other, (key_share, seed_share) in enumerate(zip(key_shares, seed_shares, strict=True))
    ]
    shares = Shares(
        sealed=sealed,
        key_digests=[digest(part) for part in key_shares],
        seed_digests=[digest(part) for part in seed_shares],
    )
    return _reply(message, shares)


def summed(
    message: Message, context: Context, handler: Callable[[Message, Context], Message]
) -> Message:
    """Answer a message; in a run with ``secure-sums``, a model leaves under masks only."""
    phase = _summed_phase(message, context)
    if phase is None:
        return handler(message, context)
    if SECURE not in message.content.config_records:
        raise SumRefusedError(
            "the server asks for a model without masks", where="secure-sums", value=True
        )
    request, files = _request(message, SumRequest), _files(context)
    state = _state(files, request.number, "shared")
    members, place = request.members, int(state["place"])
    needed = threshold(len(state["nodes"]))
    if not {place} <= set(members) <= set(range(len(state["nodes"]))):
        raise SumRefusedError("its members are not those of the sum")
    if len(set(members)) < max(needed, len(members)):
        raise SumRefusedError(f"the sum is of {len(set(members))} nodes, and needs {needed}")
    # Before the reply: with the same masks, two replies would give their difference away.
    opened = _opened_shares(state, request, context)
    _write(files, **{**state, "step": "masked", "members": members, "held": opened})
    del message.content[SECURE]
    start = as_arrays(message.content.array_records.get(ARRAYS, ArrayRecord()))
    view, bounds = bytes.fromhex(state["view"]), (request.longest, request.most)
    scale = kept_scale(store_of(context))
    seen = context_of(view, message.content, phase, context.run_config, bounds, scale)
    records = summed_records(phase, message.content, start)
    reply = handler(message, context)
    if not reply.content.array_records:  # a reason for not training
        return reply
    longest = request.longest if ARRAYS in records else math.inf  # updates alone are shortened
    numbers, weight = _numbers(
        reply.content, records, longest=longest, most=request.most, num_nodes=len(members)
    )
    masked = _under_masks(quantised(numbers, weight), state, members, seen)
    own = reply.content.metric_records[METRICS]
    metrics = MetricRecord({key: value for key, value in own.items() if key not in UNTOLD})
    arrays = ArrayRecord({MASKED: Array(masked)})
    return Message(RecordDict({MASKED: arrays, METRICS: metrics}), reply_to=message)


def unmask(message: Message, context: Context) -> Message:
    """Give shares away: of survivors the own mask's, of the others the mask key's; never both."""
    request, files = _request(message, Unmasking), _files(context)
    state = _state(files, request.number, "masked")
    members, survivors = state["members"], set(request.survivors)
    needed = threshold(len(state["nodes"]))
    if not survivors <= set(members) or state["place"] not in survivors:
        raise SumRefusedError("its survivors are not those of the sum")
    if len(survivors) < needed:
        raise SumRefusedError(f"{len(survivors)} nodes are in the sum, and {needed} must be")
    _write(files, number=request.number, step="over")
    shares = [
        bytes.fromhex(state["held"][str(member)][member in survivors])
        if str(member) in state["held"]
        else b""
        for member in members
    ]
    return _reply(message, Unmasked(shares=shares))


def _summed_phase(message: Message, context: Context) -> Phase | None:
    """The phase of a message whose replies are summed; None if they are not.

    Refuses messages with models that are not, such as plain training where a method sums others.
    """
    if not context.run_config.get("secure-sums"):
        return None
    strategy = str(context.run_config.get("strategy", ""))
    method, message_type = find_method(strategy), message.metadata.message_type
    if message_type in summed_in(method):
        return phases_of(method)[message_type]
    if message_type not in phases_of(method, secure_sums=True):
        raise SumRefusedError(
            f"there are no masks for {message_type!r}", where="strategy", value=strategy
        )
    return None


def _refused_keys(peers: Peers, context: Context) -> list[int]:
    """Places of keys that no node of the federation signed, or one node under two ids.

    Without credentials nothing is checked. A name that occurs twice counts only where both have
    signed: anyone can show another's certificate.
    """
    credentials = Credentials.of(context.node_config)
    if credentials is None:
        return []
    refused, named = [], defaultdict(list)
    for place, node in enumerate(peers.nodes):
        try:
            credentials.check_peer(peers.signed(place), context.run_id, node)
            named[peers.names[place]].append(place)
        except LinkError as error:
            log(WARNING, "The keys of node %s for a secure sum: %s", node, error)
            refused.append(place)
    for name, places in named.items():
        if len(places) > 1:
            log(WARNING, "The certificate of %s is of %d nodes in a secure sum", name, len(places))
            refused += places
    return refused


def _opened_shares(
    state: dict[str, Any], request: SumRequest, context: Context
) -> dict[str, list[str]]:
    """Shares of the members' mask keys and seeds, as hexadecimal text, by place."""
    key, view, nodes = _key(state["seal_key"]), bytes.fromhex(state["view"]), state["nodes"]
    place = int(state["place"])
    opened = {str(place): state["own_shares"]}
    for member, sealed in zip(request.members, request.sealed, strict=True):
        if member == place:
            continue
        peer_key = bytes.fromhex(state["seal_keys"][member])
        way = waybill(view, nodes[member], nodes[place], peer_key)
        try:
            both = unseal(sealed, way, context.run_id, key)
        except LinkError as error:
            log(WARNING, "The shares of node %s in a secure sum: %s", nodes[member], error)
            continue
        half = len(both) // 2
        opened[str(member)] = [both[:half].hex(), both[half:].hex()]
    return opened


def _numbers(
    content: RecordDict,
    records: Mapping[str, Arrays],
    *,
    longest: float,
    most: int,
    num_nodes: int,
) -> tuple[NDArray[np.float64], int]:
    """Numbers to sum, and their weight; see `num_masked`. Of the model they are its change."""
    if content.array_records.keys() != records.keys():
        raise SumRefusedError(
            f"{', '.join(sorted(records))} are summed, and the reply has other records",
            value=sorted(content.array_records),
        )
    own = content.metric_records[METRICS]
    samples = int(own[NUM_EXAMPLES])  # type: ignore[arg-type]
    weight = min(samples, most or samples)
    if weight * num_nodes > MAX_WEIGHT:
        raise SumRefusedError(
            f"{weight:,} samples are more than {MAX_WEIGHT // num_nodes:,}, the most of each of "
            f"{num_nodes} nodes in a secure sum",
            remedy="set most-samples lower",
        )
    parts = []
    for name, like in records.items():
        start = like if name == ARRAYS else None
        arrays = as_arrays(content.array_records[name])
        parts += _shortened(name, {key: arrays[key] for key in like}, start, longest)
    metrics: list[float] = []
    for key in SUMMED_METRICS:
        metrics += [float(own[key]), 1.0] if key in own else [0.0, 0.0]  # type: ignore[arg-type]
    return np.concatenate([*parts, [1.0, *metrics]]), weight


def _shortened(
    name: str, arrays: Arrays, start: Arrays | None, longest: float
) -> list[NDArray[np.float64]]:
    """Changes of a record's arrays, from zeros if there is no start, in a norm of `longest`."""
    norm, changes = update_norm(arrays, start), []
    if norm > longest:
        log(WARNING, "The norm of this node's %s, %.4g, is cut to %.4g", name, norm, longest)
    for key, array in arrays.items():
        change = array.astype(np.float64)
        if start is not None:
            change -= start[key].astype(np.float64)
        if norm > longest and array.dtype.kind == "f":
            change *= longest / norm
        changes.append(change.ravel())
    return changes


def _under_masks(
    values: Masked, state: dict[str, Any], members: list[int], context: bytes
) -> Masked:
    place, key = int(state["place"]), _key(state["mask_key"])
    masked = values + stream(bytes.fromhex(state["seed"]), values.size)
    for member in members:
        if member != place:
            other_key = bytes.fromhex(state["mask_keys"][member])
            masked += pair_mask(place, member, key, other_key, context, values.size)
    return masked


def _request(message: Message, kind: type[B]) -> B:
    return kind.checked(message.content.config_records.get(SECURE, ConfigRecord()), "message")


def _reply(message: Message, block: Block, name: str = SECURE) -> Message:
    record = ConfigRecord(block.model_dump(by_alias=True))
    return Message(RecordDict({name: record}), reply_to=message)


def _files(context: Context) -> NodeStore:
    return store_of(context).below(FOLDER)


def _state_of(files: NodeStore) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(files.read(STATE) or '{"number": 0, "step": ""}')
    return state


def _write(files: NodeStore, **state: Any) -> None:
    files.write(STATE, json.dumps(state).encode())


def _state(files: NodeStore, number: int, step: str) -> dict[str, Any]:
    """State of the sum of this number, which must be at a step: each step is taken once."""
    state = _state_of(files)
    if (state["number"], state["step"]) != (number, step):
        raise SumRefusedError(
            f"sum {number} is not {step} on this node: its last one, {state['number']}, is "
            f"{state['step'] or 'none'}",
            remedy="each step is taken once",
        )
    return state


def _key(text: str) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(bytes.fromhex(text))
