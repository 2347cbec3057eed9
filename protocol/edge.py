"""What an edge's node says to the edge, and to its run below; and which runs it can take part in.

An edge takes part in a run above as one node, and answers with a run of its own below.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from numpy.typing import NDArray
from pydantic import Field
from safetensors.numpy import load, save

from flwr_distill.links.records import NodeId
from flwr_distill.protocol.arrays import as_arrays, as_record
from flwr_distill.protocol.meeting import Continuation
from flwr_distill.protocol.messages import CONFIG, SERVER_ROUND
from flwr_distill.protocol.method import Method
from flwr_distill.protocol.registry import find_method
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.settings import Block, RunConfigValue, TaskSettings, TrainSettings

DOOR = "edge"
"""Socket of the edge itself, in the folder that its node's config names."""
OPEN = "Open"
"""Call of the edge: have the run below be there for a run above; the answer is an `Opened`."""
ASK = "Ask"
"""Call of the run below: answer a message from above."""
GREET = "Greet"
"""Call of the run below: say that you are there."""
END = "End"
"""Call of the run below: write your results with what you have."""
SHARE = 0.75
"""Of the time that is left for an answer: what a phase below may take."""
AVERAGES = "an edge takes part in runs whose strategy only averages models, such as fedavg"


class Opening(Block):
    """What an edge must know of a run above."""

    run: NodeId
    """Flower's id."""
    run_config: Annotated[dict[str, RunConfigValue], Field(max_length=10_000)]
    """With all keys, flat."""
    earlier: Continuation | None = None
    """The run that this one resumes."""


class Opened(Block):
    """The socket of the run below, and whether that run continues from an earlier one."""

    socket: str
    resumed: bool


def to_bytes(message: Message) -> bytes:
    """A message's type and content, as `from_bytes` reads them: a line of JSON, and its arrays."""
    records: dict[str, tuple[str, dict[str, Any]]] = {}
    arrays: dict[str, NDArray[np.generic]] = {}
    for name, record in message.content.items():
        if isinstance(record, ArrayRecord):
            own = {key: str(len(arrays) + i) for i, key in enumerate(record)}
            values = as_arrays(record)
            arrays |= {place: np.array(values[key], order="C") for key, place in own.items()}
            records[name] = "arrays", own
        else:
            kind = "metrics" if isinstance(record, MetricRecord) else "config"
            records[name] = kind, dict(record)
    header = json.dumps({"type": message.metadata.message_type, "records": records})
    return header.encode() + b"\n" + save(arrays)


def from_bytes(content: bytes) -> Message:
    """Read a message."""
    head, _, tail = content.partition(b"\n")
    header, arrays = json.loads(head), load(tail)
    records = RecordDict()
    for name, (kind, values) in header["records"].items():
        if kind == "arrays":
            records[name] = as_record({key: arrays[place] for key, place in values.items()})
        else:
            records[name] = MetricRecord(values) if kind == "metrics" else ConfigRecord(values)
    return Message(records, 0, header["type"])


def why_not_above(run_config: Mapping[str, RunConfigValue]) -> str:
    """Why an edge cannot take part in a run above, with the remedy; empty if it can."""
    if run_config.get("secure-sums"):
        return (
            "secure-sums = true needs the nodes themselves (start the run without; the edge can "
            "have it below: flwr-distill edge -c secure-sums=true)"
        )
    if run_config.get("evaluate.model"):
        return "evaluate.model needs the nodes themselves (an edge takes part in runs that train)"
    if run_config.get("start"):
        return f"start = {run_config['start']!r} asks nodes for more than a model ({AVERAGES})"
    strategy = str(run_config.get("strategy", ""))
    method = find_method(strategy)
    if method is not None and not averages_alone(method):
        return f"strategy = {strategy!r} asks nodes for more than a model ({AVERAGES})"
    return ""


def averages_alone(method: Method) -> bool:
    """Whether nodes of a method get and send models alone, by Flower's plain messages."""
    others = set(method.terms) - keys_of(TrainSettings)
    return not (method.phases or method.outcome == "personal" or method.needs or others)


def task_of(run_config: Mapping[str, RunConfigValue]) -> dict[str, RunConfigValue]:
    """Keys of a run above that apply below too: those of the task, but for places of files."""
    own = keys_of(TaskSettings) - {"data-root", "download"}
    return {key: value for key, value in run_config.items() if key.partition(".")[0] in own}


def keys_of(table: type[Block]) -> set[str]:
    """Keys of a table, without those of tables in it."""
    return {field.alias or name for name, field in table.model_fields.items()}


def check_plain(message: Message) -> None:
    """Check that a message of training or evaluation brings a model, and settings of training.

    Raises SettingsError if it brings anything else.
    """
    content = message.content
    others = [name for name in content if name not in content.array_records and name != CONFIG]
    others += list(content.array_records)[1:]
    if message.metadata.message_type == MessageType.TRAIN:
        config = content.config_records.get(CONFIG, ConfigRecord())
        others += set(config) - keys_of(TrainSettings) - {SERVER_ROUND}
    if others or not content.array_records:
        what = f"it brings {min(others)!r}" if others else "it brings no model"
        raise SettingsError(f"{what}: {AVERAGES}", where="message")
