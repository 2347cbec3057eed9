"""Descriptions of nodes: each node is asked once."""

from collections.abc import Iterable
from dataclasses import dataclass
from logging import WARNING

from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from links.credentials import key_of
from links.records import Introduction
from protocol.meeting import DESCRIBE, DescribeConfig, DescribeMetrics, Requirement
from protocol.messages import CONFIG, INTRODUCTION, METRICS
from protocol.replies import usable
from task.settings import SettingsError


@dataclass(frozen=True)
class Description:
    """How a node describes itself.

    Parameters
    ----------
    num_examples : int
        Training samples.
    partition : int, optional
        Its partition, if any.
    sector : int, optional
        The sector declared by its owner.
    dataset : str
        Its own data set, used in place of the run's; empty if none.
    introduction : Introduction, optional
        What others need to send to it.
    together : bool (default: False)
        Whether it is a virtual node that trains together with others.
    key : str (default: "")
        Fingerprint of its certificate's key, if it signed the introduction with that.
    """

    num_examples: int
    partition: int | None
    sector: int | None
    dataset: str
    introduction: Introduction | None
    together: bool = False
    key: str = ""


class Directory:
    """Descriptions of nodes by id; a node is asked when first looked up.

    Parameters
    ----------
    requirement : Requirement, optional (default: None)
        The plug-in that the run needs on nodes; those without it reply with an error.
    """

    def __init__(self, requirement: Requirement | None = None) -> None:
        self._requirement = requirement
        self._descriptions: dict[int, Description] = {}

    def look_up(
        self, grid: Grid, nodes: Iterable[int], timeout: float | None = None
    ) -> dict[int, Description]:
        """Descriptions of nodes, in their order; unknown ones are asked for theirs.

        Waits `timeout` seconds. Nodes without a usable answer are logged and left out.
        """
        nodes = list(nodes)
        content = RecordDict()
        if self._requirement:
            content[CONFIG] = ConfigRecord(self._requirement.model_dump(by_alias=True))
        new = [node for node in nodes if node not in self._descriptions]
        messages = [Message(content, node, DESCRIBE) for node in new]
        for reply in usable(grid.send_and_receive(messages, timeout=timeout)):
            node = reply.metadata.src_node_id
            try:
                self._descriptions[node] = _read(reply)
            except SettingsError as error:
                log(WARNING, "Node %d describes itself badly: %s", node, error)
        return {node: self._descriptions[node] for node in nodes if node in self._descriptions}

    def forget(self, node: int) -> None:
        """Ask a node again at the next look-up, because its description may be outdated."""
        self._descriptions.pop(node, None)


def _read(reply: Message) -> Description:
    content = reply.content
    metrics = DescribeMetrics.checked(content.metric_records.get(METRICS, MetricRecord()), METRICS)
    introduction, dataset, key = None, "", ""
    if INTRODUCTION in content.config_records:
        record = content.config_records[INTRODUCTION]
        introduction = Introduction.checked(record, INTRODUCTION)
        key = key_of(introduction, reply.metadata.run_id, reply.metadata.src_node_id)
    if CONFIG in content.config_records:
        dataset = DescribeConfig.checked(content.config_records[CONFIG], CONFIG).dataset
    return Description(
        num_examples=metrics.num_examples,
        partition=metrics.partition_id,
        sector=metrics.sector,
        dataset=dataset,
        introduction=introduction,
        together=bool(metrics.together),
        key=key,
    )
