"""Descriptions of nodes, and their names; each node describes itself once."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from logging import WARNING
from typing import Any

from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from flwr_distill.base.text import listed
from flwr_distill.links.credentials import key_of
from flwr_distill.links.records import Introduction
from flwr_distill.protocol.meeting import (
    DESCRIBE,
    DescribeConfig,
    DescribeMetrics,
    Requirement,
    one_line,
)
from flwr_distill.protocol.messages import CONFIG, INTRODUCTION, METRICS
from flwr_distill.protocol.outliers import capped
from flwr_distill.protocol.replies import handlers_remedy, has_no_handler
from flwr_distill.task.columns import Scale
from flwr_distill.task.errors import SettingsError

OPTIONAL = ("frozen", "resumes", "classes", "columns", "column_means", "column_deviations")
"""Fields of the requirement that the message omits if they are empty."""
NO_SAMPLES = "it has no training samples"
SILENT = "no answer in time"
"""Of a node that is busy, or hangs."""
MAX_LINES = 10
"""Distinct reasons in an error or a log."""


@dataclass(frozen=True)
class Description:
    """How a node describes itself."""

    num_examples: int
    """Training samples."""
    partition: int | None = None
    sector: int | None = None
    """Declared by its owner."""
    dataset: str = ""
    """Its own data set, used in place of the run's; empty if none."""
    introduction: Introduction | None = None
    """What others need to send to it."""
    together: bool = False
    """Whether it is a virtual node that trains in a batch with others."""
    name: str = ""
    """Given by its owner; several nodes may have the same."""
    class_names: tuple[str, ...] = ()
    """Names of all classes by its class folders, if the run has not named them."""
    classes: tuple[int, ...] | None = None
    """Labels among its training samples; None if it does not say."""
    missing: tuple[str, ...] = ()
    """Why it cannot take part; empty if it can."""
    key: str = ""
    """By which it is recognised: its certificate's key, if it signed the introduction with that,
    else a hash of the secret of its state directory for this run."""
    resumed_key: str = ""
    """The same with the secret for the run that this one resumes."""
    fingerprint: str = ""
    """Of the data that it has read, keyed for this run; empty if it does not say."""
    codecs: tuple[str, ...] = ()
    """Codecs of models that what connects it reads and writes."""
    loopback: bool = False
    """Whether it says that it calls the SuperLink on its own machine."""
    version: str = ""
    """Of flwr-distill there; empty if it does not say."""
    device: str = ""
    """On which it computes; empty likewise."""

    @property
    def read(self) -> dict[str, Any]:
        """The data that it has read, as a run records them."""
        return {"samples": self.num_examples, "fingerprint": self.fingerprint}


class Directory:
    """Descriptions of nodes by id; a node describes itself when first looked up.

    Parameters
    ----------
    requirement : Requirement, optional (default: None)
        What the run's method needs on nodes.
    most_samples : float (default: 10.0)
        A node's samples count at most this many times the median of all connected nodes', and no
        more than these usually differ (`protocol.outliers.capped`); 0 counts all.
    class_names : tuple[str, ...] (default: ())
        Names of the run's classes by label, if its settings or data set give them; else empty until
        nodes have agreed on theirs.

    Attributes
    ----------
    names : dict[int, str]
        Name of each node that described itself: its owner's, else ``node-3`` by its partition, or
        ``usps/3`` if it has a data set of its own. Of nodes with one name that are connected at the
        same time, the later ones are called ``ward-3 (2)`` and so on.
    num_examples : dict[int, int]
        Training samples of each node by its first description.
    resumes : str
        Flower's id of the run that this one resumes; empty for none.
    scale : Scale, optional
        By what nodes standardise columns of their own tables; None if the run states all.
    """

    def __init__(
        self,
        requirement: Requirement | None = None,
        most_samples: float = 10.0,
        class_names: tuple[str, ...] = (),
    ) -> None:
        self.most_samples = most_samples
        self.class_names = class_names
        self.names: dict[int, str] = {}
        self.num_examples: dict[int, int] = {}
        self._requirement = requirement
        self.resumes = ""
        self.scale: Scale | None = None
        self._descriptions: dict[int, Description] = {}
        self._missing: dict[int, tuple[str, ...]] = {}

    def look_up(
        self, grid: Grid, nodes: Iterable[int], timeout: float | None = None
    ) -> dict[int, Description]:
        """Descriptions of nodes, in their order; unknown ones get a request.

        Waits `timeout` seconds. A node that is missing something, or gives no usable answer, has a
        description that says why, and gets another request at the next look-up. The log says why
        once.
        """
        nodes = list(nodes)
        answers: dict[int, Description] = {}
        if new := [node for node in nodes if node not in self._descriptions]:
            answers = self._ask(grid, new, timeout)
            self._name(grid, answers)
        self._warn(answers)
        for node, answer in answers.items():
            if not answer.missing:
                first = self.num_examples.setdefault(node, answer.num_examples)
                answers[node] = replace(answer, num_examples=first)
        self._descriptions |= {node: a for node, a in answers.items() if not a.missing}
        return {node: answers.get(node) or self._descriptions[node] for node in nodes}

    def forget(self, node: int) -> None:
        """Ask a node again at the next look-up, because its description may be outdated."""
        self._descriptions.pop(node, None)

    def samples(self, nodes: Iterable[int]) -> dict[int, int]:
        """Samples of each node that count: as first described, limited by `outliers.capped`.

        `nodes` are all that are connected, not only those of interest: the median of two is no
        measure, and nodes that are gone may have been there for their claims alone.
        """
        claims = {node: self.num_examples[node] for node in nodes if node in self.num_examples}
        return capped(claims, self.most_samples)

    def codecs(self, nodes: Iterable[int]) -> list[tuple[str, ...]]:
        """Codecs of each node; none of one that is not described."""
        return [self._descriptions.get(node, Description(0)).codecs for node in nodes]

    def data(self, node: int) -> str:
        """Fingerprint of a node's data, which only the same data in the same state directory have.

        Empty if the node is not described.
        """
        return self._descriptions.get(node, Description(0)).fingerprint

    def name(self, node: int) -> str:
        """What to call a node; one that has no name by the last digits of its id."""
        return self.names.get(node, f"node …{str(node)[-5:]}")

    def class_name(self, label: int) -> str:
        """Name of a class; without names its label."""
        return self.class_names[label] if label < len(self.class_names) else str(label)

    def _ask(self, grid: Grid, nodes: list[int], timeout: float | None) -> dict[int, Description]:
        content = RecordDict()
        if self._requirement or self.resumes or self.scale:
            scale = self.scale or Scale((), ())
            requirement = (self._requirement or Requirement()).model_copy(
                update={
                    "resumes": self.resumes,
                    "column_means": list(scale.mean),
                    "column_deviations": list(scale.deviation),
                }
            )
            empty = {key for key in OPTIONAL if not getattr(requirement, key)}
            content[CONFIG] = ConfigRecord(requirement.model_dump(by_alias=True, exclude=empty))
        messages = [Message(content, node, DESCRIBE) for node in nodes]
        answers = dict.fromkeys(nodes, Description(0, missing=(SILENT,)))
        for reply in grid.send_and_receive(messages, timeout=timeout):
            answers[reply.metadata.src_node_id] = _read(reply)
        return answers

    def _warn(self, answers: Mapping[int, Description]) -> None:
        """Log why nodes cannot take part, unless a node gave the same reason last time."""
        news = {}
        for node, answer in answers.items():
            known = self._missing.pop(node, ())
            news[self.name(node)] = [reason for reason in answer.missing if reason not in known]
            if answer.missing:
                self._missing[node] = answer.missing
        for line in by_reason(news):
            log(WARNING, "Cannot take part: %s", line)

    def _name(self, grid: Grid, answers: Mapping[int, Description]) -> None:
        """Name nodes that are met for the first time."""
        connected = set(grid.get_node_ids())
        taken = {name for node, name in self.names.items() if node in connected}
        for node, answer in answers.items():
            own = answer.name or _name_by_partition(answer)
            if not own or node in self.names:
                continue
            name, count = own, 1
            while name in taken:
                count += 1
                name = f"{own} ({count})"
            self.names[node] = name
            taken.add(name)


def by_reason(missing: Mapping[str, Sequence[str]]) -> list[str]:
    """Lines such as ``ward-1, ward-2 and 12 others: reason``, for the most frequent reasons.

    `missing` are reasons by node name.
    """
    nodes: dict[str, list[str]] = {}
    for name, reasons in missing.items():
        for reason in reasons:
            nodes.setdefault(reason, []).append(name)
    ordered = sorted(nodes, key=lambda reason: -len(nodes[reason]))
    lines = [f"{listed(nodes[reason])}: {reason}" for reason in ordered[:MAX_LINES]]
    left = len(ordered) - MAX_LINES
    if left > 0:
        lines.append(f"{left} more {'reason' if left == 1 else 'reasons'}")
    return lines


def _name_by_partition(answer: Description) -> str:
    if answer.partition is None:
        return ""
    return f"{answer.dataset}/{answer.partition}" if answer.dataset else f"node-{answer.partition}"


def _read(reply: Message) -> Description:
    """A node's description, from its reply to DESCRIBE or its error."""
    if has_no_handler(reply):
        return Description(
            0, missing=(f"its ClientApp has no handlers of ours ({handlers_remedy('...')})",)
        )
    if reply.has_error():
        return Description(0, missing=(one_line(reply.error.reason) or "it failed",))
    try:
        return _checked(reply)
    except SettingsError as error:
        return Description(0, missing=(one_line(f"it describes itself badly: {error}"),))


def _checked(reply: Message) -> Description:
    content = reply.content
    metrics = DescribeMetrics.checked(content.metric_records.get(METRICS, MetricRecord()), METRICS)
    config = DescribeConfig.checked(content.config_records.get(CONFIG, ConfigRecord()), CONFIG)
    introduction, key = None, ""
    if INTRODUCTION in content.config_records:
        record = content.config_records[INTRODUCTION]
        introduction = Introduction.checked(record, INTRODUCTION)
        key = key_of(introduction, reply.metadata.run_id, reply.metadata.src_node_id)
    return Description(
        num_examples=metrics.num_examples,
        partition=metrics.partition_id,
        sector=metrics.sector,
        dataset=config.dataset or "",
        introduction=introduction,
        together=bool(metrics.together),
        name=config.name or "",
        class_names=tuple(config.class_names),
        classes=None if config.classes is None else tuple(config.classes),
        missing=tuple(config.missing) or (() if metrics.num_examples else (NO_SAMPLES,)),
        key=key or _hashed(config.secret),
        resumed_key=key or _hashed(config.resumed_secret),
        fingerprint=(config.fingerprint or b"").hex(),
        codecs=tuple(config.codecs),
        loopback=config.loopback,
        version=config.version,
        device=config.device or "",
    )


def _hashed(secret: bytes | None) -> str:
    return hashlib.sha256(secret).hexdigest() if secret else ""
