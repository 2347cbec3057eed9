"""The node of an edge: passes messages of a run above to the edge's run below."""

import json
import time
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict

from flwr_distill.client.session import deadline_of
from flwr_distill.protocol.edge import (
    ASK,
    AVERAGES,
    DOOR,
    OPEN,
    Opened,
    Opening,
    check_plain,
    from_bytes,
    to_bytes,
    why_not_above,
)
from flwr_distill.protocol.edge_calls import EdgeError, call
from flwr_distill.protocol.meeting import (
    CONTINUE,
    DESCRIBE,
    Continuation,
    Requirement,
    identity,
    one_line,
    place_secrets,
)
from flwr_distill.protocol.messages import CONFIG, EDGE, METRICS
from flwr_distill.storage.store import NodeStore
from flwr_distill.task.errors import SettingsError

PLAIN = (MessageType.TRAIN, MessageType.EVALUATE)


def pass_down(message: Message, context: Context) -> Message:
    """Answer a message by the edge's run below.

    Raises
    ------
    SettingsError
        If the run needs more than an edge can give.
    EdgeError
        If the run below cannot answer; says why.
    """
    kind = message.metadata.message_type
    if kind == DESCRIBE:
        return _describe(message, context)
    if kind == CONTINUE:
        earlier = Continuation.checked(message.content.config_records[CONFIG], "message")
        opened = _open(message, context, earlier)
        metrics = MetricRecord({"files": int(opened.resumed)})
        return Message(RecordDict({METRICS: metrics}), reply_to=message)
    if kind not in PLAIN:
        raise SettingsError(f"there is no {kind} on an edge", remedy=AVERAGES)
    check_plain(message)
    return Message(_ask(message, context), reply_to=message)


def _describe(message: Message, context: Context) -> Message:
    """The edge's name and its nodes' data, or what is missing for the run."""
    metrics, config = identity(context.node_config)
    try:
        _check_run(message, context)
        below = _ask(message, context)
        metrics.update(below.metric_records[METRICS])
        config.update(below.config_records.get(CONFIG, ConfigRecord()))
        store = NodeStore.open(
            str(context.node_config["state-dir"]), context.run_id, context.node_id
        )
        config.update(place_secrets(store, _requirement(message).resumes))
    except (EdgeError, SettingsError) as error:
        config["missing"] = [one_line(error)]
    content = RecordDict({METRICS: metrics, CONFIG: ConfigRecord(config)})
    return Message(content, reply_to=message)


def _requirement(message: Message) -> Requirement:
    record = message.content.config_records.get(CONFIG)
    return Requirement() if record is None else Requirement.checked(record, "message")


def _check_run(message: Message, context: Context) -> None:
    requirement = _requirement(message)
    reason = why_not_above(context.run_config)
    if not reason and requirement.method:
        reason = f"{requirement.method} needs more than models of its nodes ({AVERAGES})"
    if reason:
        raise SettingsError(reason)


def _ask(message: Message, context: Context) -> RecordDict:
    """The run below's answer."""
    due = deadline_of(message)
    opened = _open(message, context)
    left = max(0.0, due - time.monotonic())
    return from_bytes(call(Path(opened.socket), ASK, to_bytes(message), left)).content


def _open(message: Message, context: Context, earlier: Continuation | None = None) -> Opened:
    """Open the edge's run below."""
    opening = Opening(run=str(context.run_id), run_config=dict(context.run_config), earlier=earlier)
    request = opening.model_dump_json(by_alias=True).encode()
    door = Path(str(context.node_config[EDGE])) / DOOR
    answer = call(door, OPEN, request, message.metadata.ttl)
    return Opened.checked(json.loads(answer), "the edge")
