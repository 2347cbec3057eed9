"""What a policy says of a reply that would leave: free functions.

They read what the app has put into its reply, and do not believe it: what cannot be read is
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from safetensors import SafetensorError
from safetensors.numpy import load, save

from flwr_distill.links.records import LARGEST_PARCEL, VIRTUAL_DATA, Parcel
from flwr_distill.node.asked import Asked, Form, Refusal, forms_of
from flwr_distill.node.listed import EXACT
from flwr_distill.node.listed import METRICS as METRIC_ROWS
from flwr_distill.node.policy import Policy
from flwr_distill.node.rules import EPSILON, fits_labels
from flwr_distill.protocol.arrays import Arrays, check_arrays
from flwr_distill.protocol.messages import (
    ARRAYS,
    CONFIG,
    DATASET,
    INTRODUCTION,
    METRICS,
    NAME,
    PARCEL,
    PARTITION_ID,
    ROUTE,
    SECTOR,
)
from flwr_distill.protocol.registry import COMMON
from flwr_distill.protocol.secure_sums import SECURE
from flwr_distill.task.labels import positions


@dataclass(frozen=True)
class OwnWords:
    """What a node knows of itself.

    Parameters
    ----------
    identity : Mapping[str, object]
        Name, data set, partition and sector, where it has them.
    class_names : list of str
        Of its class folders; see :func:`task.image_files.class_names`.
    certificate : bytes
        For links; empty without one.
    address : str
        Of its mailbox; empty without one.
    secrets : Mapping[str, bytes] (default: {})
        With which it shows its place in the run, and in the one that this resumes.
    """

    identity: Mapping[str, object]
    class_names: list[str]
    certificate: bytes
    address: str
    secrets: Mapping[str, bytes] = field(default_factory=dict)


def judge_reply(
    policy: Policy,
    asked: Asked,
    reply: RecordDict,
    opened: Mapping[str, bytes],
    own: OwnWords,
    most_classes: Callable[[], int] | None = None,
) -> Refusal | None:
    """Why a policy refuses to let a reply leave; None if it does not.

    Parameters
    ----------
    reply : RecordDict
        What the app answers. If the policy lets only declared replies leave, its arrays are decoded
        in place, so that what leaves is what was looked at.
    opened : Mapping[str, bytes]
        Payloads of its parcels, by the name of the record; one that is missing does not open.
    own : OwnWords
        The node's.
    most_classes : callable, optional (default: None)
        How many classes virtual data may show; None for any number.
    """
    if policy.replies == "declared":
        try:
            _check_declared(asked, reply)
            _check_own_words(reply, own)
            _check_metrics(policy, asked, reply)
            for name in parcels_of(reply):
                _check_parcel(policy, asked, name, reply.config_records[name], opened)
        except ValueError as error:
            reason = f"the app's reply is not what strategy = {asked.strategy!r} declares"
            return Refusal("replies", f"{reason} (the node's log says more)", str(error))
    counts = most_classes is not None or policy.real_per_virtual > 1
    if policy.raw_data == "allowed" and policy.starts is None and not counts:
        return None
    for name in parcels_of(reply):
        relayed = reply.config_records[name].get("link") != "direct"
        if relayed and name not in opened and purpose_of(asked, name) == VIRTUAL_DATA:
            reason = f"{name} is not sealed for the node that the route names, and cannot be judged"
            return Refusal("replies", reason)
    refusals = (
        _judge_virtual_data(policy, payload, most, most_classes)
        for payload, most in bounded_virtual_data(asked, reply, opened)
    )
    return next((refusal for refusal in refusals if refusal), None)


def model_of_parcel(payload: bytes) -> dict[str, Form]:
    """Shapes and types of the model in a parcel; empty if it holds none."""
    try:
        return _forms(_loaded(payload))
    except ValueError:
        return {}


def parcels_of(reply: RecordDict) -> list[str]:
    """Names of the records with parcels for other nodes."""
    return [name for name in reply.config_records if name.partition(".")[0] == PARCEL]


def route_of(asked: Asked, parcel: str) -> Mapping[str, Any]:
    """The route of a parcel, by the name of its record; empty if the message has none."""
    return asked.routes.get(parcel.replace(PARCEL, ROUTE, 1), {})


def purpose_of(asked: Asked, parcel: str) -> object:
    """What the server says that a parcel holds; None if the message has no route for it."""
    return route_of(asked, parcel).get("purpose")


def virtual_data(asked: Asked, reply: RecordDict, opened: Mapping[str, bytes]) -> list[bytes]:
    """Virtual data in a reply: in parcels for other nodes, or for the server in a record."""
    return [payload for payload, _ in bounded_virtual_data(asked, reply, opened)]


def bounded_virtual_data(
    asked: Asked, reply: RecordDict, opened: Mapping[str, bytes]
) -> Iterator[tuple[bytes, int]]:
    """Virtual data in a reply, and the most bytes of each: what the route says, or any parcel's."""
    for name, payload in opened.items():
        if purpose_of(asked, name) == VIRTUAL_DATA:
            yield payload, int(route_of(asked, name).get("largest", LARGEST_PARCEL))
    for value in reply.config_records.get(VIRTUAL_DATA, ConfigRecord()).values():
        if isinstance(value, bytes):
            yield value, LARGEST_PARCEL


def claimed_epsilon(reply: RecordDict) -> float | None:
    """Epsilon that the run has spent on this node, as the app says; None if it does not say."""
    metrics = reply.metric_records.get(METRICS, MetricRecord())
    value = metrics.get(EPSILON)
    return float(value) if isinstance(value, int | float) else None


def releases(asked: Asked, reply: RecordDict) -> bool:
    """Whether a reply holds something that was made from samples: arrays, a parcel, or bytes.

    At meetings and in steps of secure sums bytes are keys and shares.
    """
    values = (value for record in reply.config_records.values() for value in record.values())
    has_bytes = any(
        isinstance(part, bytes)
        for value in values
        for part in (value if isinstance(value, list) else [value])
    )
    common = any(asked.message_type == phase.message_type for phase in COMMON)
    return bool(reply.array_records or parcels_of(reply) or (has_bytes and not common))


def _check_declared(asked: Asked, reply: RecordDict) -> None:
    phase = asked.phase
    if phase is None:
        raise ValueError("the strategy does not declare it")
    model = _arrays(asked.model, forms_of(reply.array_records.get(ARRAYS, ArrayRecord())))
    reasons = []
    for schema in phase.replies:
        try:
            return schema.check(reply, model)
        except ValueError as error:
            reasons.append(str(error))
    raise ValueError(reasons[0])


def _check_metrics(policy: Policy, asked: Asked, reply: RecordDict) -> None:
    """Check that a reply holds no exact number of samples where differential privacy is asked for.

    Raises
    ------
    ValueError
        If it does. With ``settings: listed`` that is any metric, but of an evaluation, which is
        neither on the list nor `Phase.covered`.
    """
    if not policy.least_noise:
        return
    names = reply.metric_records.get(METRICS, MetricRecord()).keys()
    if "classes" in reply.config_records.get(CONFIG, {}):
        raise ValueError("classes are not reported with differential privacy")
    follows = asked.phase is not None and asked.phase.epsilon is not None
    exact = {name for name in names if METRIC_ROWS.get(name) == EXACT}
    if policy.settings == "listed" and not asked.evaluates:
        covered = asked.phase.covered if asked.phase is not None else ()
        exact |= names - METRIC_ROWS.keys() - {*covered}
    if exact and not follows:
        raise ValueError(f"{min(exact)!r} does not leave with differential privacy")


def _check_own_words(reply: RecordDict, own: OwnWords) -> None:
    """Check what a reply says of the node itself: the node knows that as well as the app.

    Raises
    ------
    ValueError
        If it says something else.
    """
    config = reply.config_records.get(CONFIG, ConfigRecord())
    metrics = reply.metric_records.get(METRICS, MetricRecord())
    for record in (config, metrics):
        for key in (NAME, DATASET, PARTITION_ID, SECTOR):
            if key in record and record[key] != own.identity.get(key):
                raise ValueError(f"{key} is not the node's own")
    for key in ("secret", "resumed-secret"):
        if key in config and config[key] != own.secrets.get(key):
            raise ValueError(f"{key} is not the node's own")
    stated = cast(list[str], config.get("class-names", []))
    if stated not in ([], own.class_names or list(positions(len(stated)))):
        raise ValueError("class-names are not those of the node's folders")
    classes = cast(list[int], config.get("classes", []))
    if classes != sorted(set(classes)):
        raise ValueError("classes are not labels in their order")
    for name in (INTRODUCTION, SECURE):
        record = reply.config_records.get(name, ConfigRecord())
        if record.get("certificate", b"") not in (b"", own.certificate):
            raise ValueError(f"{name}: its certificate is not the node's own")
        if record.get("address", "") not in ("", own.address):
            raise ValueError(f"{name}: its address is not the node's own")


def _check_parcel(
    policy: Policy, asked: Asked, name: str, record: ConfigRecord, opened: Mapping[str, bytes]
) -> None:
    """Check that a parcel goes where the message says, and that it holds what it should."""
    parcel = Parcel.checked(record, name)
    route = route_of(asked, name)
    if route.get("token") != parcel.token:
        raise ValueError(f"{name}: the message has no route for it")
    if parcel.link == "direct":
        if policy.direct_links:
            return
        raise ValueError(f"{name}: the app has sent it past the node")
    if name not in opened:
        raise ValueError(f"{name}: it is not sealed for the node that the route names")
    if purpose_of(asked, name) != VIRTUAL_DATA:
        _check_model(name, opened[name], asked.model)


def _check_model(name: str, payload: bytes, model: Mapping[str, Form]) -> None:
    arrays = _loaded(payload)
    check_arrays(arrays, _arrays(model, _forms(arrays)))
    if save(dict(arrays)) != payload:
        raise ValueError(f"{name}: more than a model")


def _judge_virtual_data(
    policy: Policy,
    payload: bytes,
    most: int,
    most_classes: Callable[[], int] | None,
) -> Refusal | None:
    from flwr_distill.distill.errors import VirtualDataError  # here: imports torch
    from flwr_distill.distill.virtual_overview import Overview

    try:
        virtual = Overview.of(payload, most)
    except VirtualDataError as error:
        return Refusal("replies", "the virtual data in the app's reply are none", str(error))
    if policy.raw_data != "allowed" and virtual.method == "raw":
        number = sum(virtual.images_of_class)
        reason = f"{policy.raw_data}, and the reply holds {number} samples as they are"
        return Refusal("raw-data", reason)
    if policy.starts is not None and virtual.method != "raw" and virtual.init not in policy.starts:
        allowed = ", ".join(policy.starts)
        reason = f"{allowed}, and the virtual data in the reply start from something else"
        return Refusal("starts", reason, virtual.init)
    if policy.real_per_virtual > 1 and fits_labels(virtual.method):
        reason = f"{policy.real_per_virtual}, and the virtual data in the reply are not of means"
        return Refusal("real-per-virtual", reason, virtual.method)
    shown = len(virtual.labels)
    if most_classes is not None and shown > (allowed_classes := most_classes()):
        rule = "fewest-of-a-class" if policy.classes is None else "classes"
        reason = f"{shown} classes in the virtual data, and {allowed_classes} that the node uses"
        return Refusal(rule, reason)
    return None


def _loaded(payload: bytes) -> Arrays:
    try:
        return load(payload)
    except (SafetensorError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"not a model ({type(error).__name__})") from None


def _forms(arrays: Arrays) -> dict[str, Form]:
    return {name: (array.shape, str(array.dtype)) for name, array in arrays.items()}


def _arrays(model: Mapping[str, Form], answered: Mapping[str, Form]) -> Arrays:
    """Arrays of these shapes and types that take no memory.

    Single numbers have the types of the answer: Flower's strategies turn batch normalisation's
    counts of batches into floats, and nodes return them as integers.
    """
    arrays = {}
    for name, (shape, dtype) in model.items():
        if shape == () == answered.get(name, ((0,), ""))[0]:
            dtype = answered[name][1]
        try:
            arrays[name] = np.broadcast_to(np.zeros((), np.dtype(dtype)), shape)
        except (TypeError, ValueError):
            raise ValueError(f"{name} of type {dtype!r:.60} and shape {shape!r:.60}") from None
    return arrays
