"""Counts of a node's data, whether it can take part in the run's training or not."""

from pathlib import Path

from flwr.app import Context, Message, RecordDict

from flwr_distill.client.session import RunSource, source_of
from flwr_distill.protocol.messages import CLASSES, STATISTICS
from flwr_distill.protocol.statistics import DEFAULT_FLOOR, statistics_record
from flwr_distill.task.cells import Tables, rounded
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.settings import TaskSettings
from flwr_distill.task.source import PRIVATE, data_spec, domain, partition_samples
from flwr_distill.task.statistics import count_images, count_samples, count_table


def statistics(message: Message, context: Context) -> Message:
    """Reply with counts of this node's data.

    Its guard hides small ones before they leave. A node without one rounds them here.

    Raises
    ------
    SettingsError
        If the node has no data, or those of an app's own function.
    DatasetError
        If its data cannot be read at all.
    """
    source = source_of(context)
    if not isinstance(source, RunSource):
        raise SettingsError("counts are of data that a node's config or a run names", where="data")
    tables = _counted(source.task(context), context)
    if STATISTICS in context.node_config:
        record = statistics_record(tables)
    else:
        record = statistics_record(rounded(tables, DEFAULT_FLOOR), DEFAULT_FLOOR)
    return Message(RecordDict({STATISTICS: record}), reply_to=message)


def _counted(task: TaskSettings, context: Context) -> Tables:
    node = context.node_config
    root = str(node.get("data-root", ""))
    used = str(node.get(CLASSES, ""))
    only = set(used.split(",")) if used else None
    if path := node.get("data"):
        if task.dataset == PRIVATE and (columns := task.private.table):
            return count_table(Path(str(path)), columns, task.private.class_names, only)
        return count_images(Path(str(path)), data_spec(task, root).shape[0], only)
    place, shares = (node.get(key) for key in ("partition-id", "num-partitions"))
    if name := node.get("dataset"):
        part = None if shares is None else (int(place or 0), int(shares))
        own = domain(task, str(name), part, root)
        return count_samples(own.train, own.spec)
    if task.dataset == PRIVATE or place is None or shares is None:
        raise SettingsError(
            "this node has neither data of its own nor a share of a named set",
            where="node config",
            remedy="start the node with --data FOLDER, or --partition-id I --num-partitions N",
        )
    raw = partition_samples(task, int(place), int(shares), root)
    return count_samples(raw, data_spec(task, root))
