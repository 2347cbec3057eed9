"""What a policy says of a reply that would leave: free functions.

They read what the app has put into its reply, and do not trust it: what is unreadable is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from flwr_distill.links.records import VIRTUAL_DATA, Parcel
from flwr_distill.node.listed import EXACT
from flwr_distill.node.listed import METRICS as METRIC_ROWS
from flwr_distill.node.parcels import Payload, array_forms, parcels_of, virtual_data_in
from flwr_distill.node.policy import Policy
from flwr_distill.node.requests import Form, MessageRequest, Refusal, forms_of
from flwr_distill.node.rules import EPSILON, fits_labels
from flwr_distill.protocol.arrays import Arrays, check_arrays
from flwr_distill.protocol.messages import (
    ARRAYS,
    CONFIG,
    DATASET,
    INTRODUCTION,
    METRICS,
    NAME,
    PARTITION_ID,
    SECTOR,
)
from flwr_distill.protocol.registry import COMMON
from flwr_distill.protocol.secure_sums import SECURE
from flwr_distill.task.labels import positions


@dataclass(frozen=True)
class NodeIdentity:
    """What a node knows of itself; empty where it has none."""

    identity: Mapping[str, object]
    """Name, data set, partition and sector."""
    class_names: list[str]
    """Of its class folders; see :func:`task.image_files.class_names`."""
    certificate: bytes
    """For links."""
    address: str
    """Of its mailbox."""
    secrets: Mapping[str, bytes] = field(default_factory=dict)
    """With which it shows its place in the run, and in the one that this resumes."""


def judge_reply(
    policy: Policy,
    request: MessageRequest,
    reply: RecordDict,
    payloads: Mapping[str, Payload],
    own: NodeIdentity,
    max_classes: Callable[[], int] | None = None,
) -> Refusal | None:
    """Why a policy refuses to let a reply leave; None if it does not.

    Where replies must be declared, arrays are decoded in place, so that what was judged leaves. A
    parcel without a payload (`Opener.payloads`) does not open. `max_classes` bounds classes in
    virtual data.
    """
    if policy.replies == "declared":
        try:
            _check_declared(request, reply)
            _check_own_words(reply, own)
            _check_metrics(policy, request, reply)
            for name in parcels_of(reply):
                _check_parcel(policy, request, name, reply.config_records[name], payloads)
        except ValueError as error:
            reason = f"the app's reply is not what strategy = {request.strategy!r} declares"
            return Refusal("replies", f"{reason} (the node's log says more)", str(error))
    counts = max_classes is not None or policy.real_per_virtual > 1
    if policy.raw_data == "allowed" and policy.starts is None and not counts:
        return None
    for name in parcels_of(reply):
        relayed = reply.config_records[name].get("link") != "direct"
        if relayed and name not in payloads and purpose_of(request, name) == VIRTUAL_DATA:
            reason = f"{name} is not sealed for the node that the route names, and cannot be judged"
            return Refusal("replies", reason)
    refusals = (_judge_virtual_data(policy, p, max_classes) for p in virtual_data_in(payloads))
    return next((refusal for refusal in refusals if refusal), None)


def purpose_of(request: MessageRequest, parcel: str) -> object:
    """What the server says that a parcel holds; None if the message has no route for it."""
    return request.route_of(parcel).get("purpose")


def claimed_epsilon(reply: RecordDict) -> float | None:
    """Epsilon that the run has spent on this node, as the app claims; None if it does not."""
    value = _metrics(reply).get(EPSILON)
    return float(value) if isinstance(value, int | float) else None


def releases(request: MessageRequest, reply: RecordDict) -> bool:
    """Whether a reply holds something that was made from samples: arrays, a parcel, or bytes.

    Or a metric that differential privacy covers. At meetings and in steps of secure sums bytes are
    keys and shares.
    """
    covered = request.phase.covered if request.phase is not None else ()
    if reply.array_records or parcels_of(reply) or not _metrics(reply).keys().isdisjoint(covered):
        return True
    if any(request.message_type == phase.message_type for phase in COMMON):
        return False
    values = (value for record in reply.config_records.values() for value in record.values())
    parts = (part for v in values for part in (v if isinstance(v, list) else [v]))
    return any(isinstance(part, bytes) for part in parts)


def _config(reply: RecordDict, name: str = CONFIG) -> ConfigRecord:
    return reply.config_records.get(name, ConfigRecord())


def _metrics(reply: RecordDict) -> MetricRecord:
    return reply.metric_records.get(METRICS, MetricRecord())


def _check_declared(request: MessageRequest, reply: RecordDict) -> None:
    phase = request.phase
    if phase is None:
        raise ValueError("the strategy does not declare it")
    model = _like(request.model, forms_of(reply.array_records.get(ARRAYS, ArrayRecord())))
    reasons = []
    for schema in phase.replies:
        try:
            return schema.check(reply, model)
        except ValueError as error:
            reasons.append(str(error))
    raise ValueError(reasons[0])


def _check_metrics(policy: Policy, request: MessageRequest, reply: RecordDict) -> None:
    """Check that no exact number of samples leaves where differential privacy is asked for.

    With ``settings: listed`` any metric is exact that is neither on the list nor `Phase.covered`,
    but for those of evaluations.
    """
    if not policy.least_noise:
        return
    if "classes" in _config(reply):
        raise ValueError("classes are not reported with differential privacy")
    names = _metrics(reply).keys()
    exact = {name for name in names if METRIC_ROWS.get(name) == EXACT}
    if policy.settings == "listed" and not request.evaluates:
        covered = request.phase.covered if request.phase is not None else ()
        exact |= names - METRIC_ROWS.keys() - {*covered}
    follows = request.phase is not None and request.phase.epsilon is not None
    if exact and not follows:
        raise ValueError(f"{min(exact)!r} does not leave with differential privacy")


def _check_own_words(reply: RecordDict, own: NodeIdentity) -> None:
    """Check what a reply says of the node itself: the node knows that as well as the app."""
    config = _config(reply)
    known = {key: own.identity.get(key) for key in (NAME, DATASET, PARTITION_ID, SECTOR)}
    known |= {key: own.secrets.get(key) for key in ("secret", "resumed-secret")}
    for record in (config, _metrics(reply)):
        if odd := [key for key in known if key in record and record[key] != known[key]]:
            raise ValueError(f"{odd[0]} is not the node's own")
    names = cast(list[str], config.get("class-names", []))
    if names not in ([], own.class_names or list(positions(len(names)))):
        raise ValueError("class-names are not those of the node's folders")
    classes = cast(list[int], config.get("classes", []))
    if classes != sorted(set(classes)):
        raise ValueError("classes are not labels in their order")
    for name in (INTRODUCTION, SECURE):
        for key, ours in (("certificate", own.certificate), ("address", own.address)):
            if _config(reply, name).get(key) not in (None, type(ours)(), ours):
                raise ValueError(f"{name}: its {key} is not the node's own")


def _check_parcel(
    policy: Policy,
    request: MessageRequest,
    name: str,
    record: ConfigRecord,
    payloads: Mapping[str, Payload],
) -> None:
    parcel = Parcel.checked(record, name)
    if request.route_of(name).get("token") != parcel.token:
        raise ValueError(f"{name}: the message has no route for it")
    if parcel.link == "direct":
        if policy.direct_links:
            return
        raise ValueError(f"{name}: the app has sent it past the node")
    if name not in payloads:
        raise ValueError(f"{name}: it is not sealed for the node that the route names")
    if (payload := payloads[name]).purpose != VIRTUAL_DATA:
        check_arrays(payload.model, _like(request.model, array_forms(payload.model)))


def _judge_virtual_data(
    policy: Policy, payload: Payload, max_classes: Callable[[], int] | None
) -> Refusal | None:
    from flwr_distill.distill.errors import VirtualDataError  # here: imports torch

    try:
        virtual = payload.virtual_data
    except VirtualDataError as error:
        return Refusal("replies", "the app's reply holds malformed virtual data", str(error))
    if policy.raw_data != "allowed" and virtual.method == "raw":
        number = sum(virtual.images_of_class)
        reason = f"{policy.raw_data}, and the reply holds {number} samples unchanged"
        return Refusal("raw-data", reason)
    if policy.starts is not None and virtual.method != "raw" and virtual.init not in policy.starts:
        allowed = ", ".join(policy.starts)
        reason = f"{allowed}, and the virtual data in the reply start from something else"
        return Refusal("starts", reason, virtual.init)
    if policy.real_per_virtual > 1 and fits_labels(virtual.method):
        reason = f"{policy.real_per_virtual}, and the virtual data in the reply are not of means"
        return Refusal("real-per-virtual", reason, virtual.method)
    shown = len(virtual.labels)
    if max_classes is not None and shown > (allowed_classes := max_classes()):
        rule = "fewest-of-a-class" if policy.classes is None else "classes"
        reason = f"{shown} classes in the virtual data, and {allowed_classes} that the node uses"
        return Refusal(rule, reason)
    return None


def _like(model: Mapping[str, Form], reply: Mapping[str, Form]) -> Arrays:
    """Arrays of these shapes and types that take no memory.

    Single numbers have the types of the reply: Flower's strategies turn batch normalisation's
    counts of batches into floats, and nodes return them as integers.
    """
    arrays = {}
    for name, (shape, dtype) in model.items():
        if shape == () == reply.get(name, ((0,), ""))[0]:
            dtype = reply[name][1]
        try:
            arrays[name] = np.broadcast_to(np.zeros((), np.dtype(dtype)), shape)
        except (TypeError, ValueError):
            raise ValueError(f"{name} of type {dtype!r:.60} and shape {shape!r:.60}") from None
    return arrays
