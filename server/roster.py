"""The nodes of a run: ids, names, order, and which cannot take part."""

import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from logging import INFO, WARNING
from typing import TypeVar

from flwr.common import log
from flwr.serverapp import Grid

from flwr_distill.base.text import counted, listed
from flwr_distill.protocol.meeting import own_version
from flwr_distill.strategies.common.directory import SILENT, Description, Directory, by_reason
from flwr_distill.strategies.common.retries import Retries
from flwr_distill.strategies.common.waiting import TooFewNodesError, connected_nodes
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.labels import LabelMap, in_order

_PAUSE = (0.5, 1.5)
"""Seconds between requests to busy nodes."""
MAX_CLASSES = 100
"""Class names in the setting that an error suggests."""
K = TypeVar("K")


@dataclass
class Roster:
    """The nodes of a run, in the order in which it met them."""

    directory: Directory = field(default_factory=Directory)  # asks nodes who they are
    tested: tuple[int, ...] = ()
    """Classes that the model is tested on; it is a warning if no node holds one."""
    num_classes: int | None = None  # number of classes, which class folders must be; None for any
    nodes: dict[int, Description] = field(default_factory=dict)
    """Descriptions of the nodes that take part; one that returns with a new id is listed twice."""
    excluded: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Nodes that cannot take part, and why. They are asked again after 1, 2, 4 ... rounds."""
    warnings: list[str] = field(default_factory=list)
    """Possible faults of the federation."""
    _retries: Retries = field(default_factory=Retries)
    _stated: dict[int, tuple[str, ...]] = field(default_factory=dict)
    _connected: list[int] = field(default_factory=list)

    @property
    def names(self) -> dict[int, str]:
        """Name of each node id."""
        return {node: self.directory.name(node) for node in self.nodes}

    @property
    def identities(self) -> dict[int, str]:
        """What identifies each node in a resumed run: its partition, else its name, else its id.

        With its data set if that differs from the run's, as in ``usps/1``.
        """
        return {node: _identity(node, about) for node, about in self.nodes.items()}

    @property
    def order(self) -> dict[int, int]:
        """Rank of each node id, the same in every run of the same federation."""
        return {node: rank for rank, node in enumerate(self.nodes)}

    @property
    def keys(self) -> dict[int, str]:
        """Fingerprint of each node's key or secret; see `Description.key`."""
        return {node: about.key for node, about in self.nodes.items() if about.key}

    @property
    def resumed_keys(self) -> dict[int, str]:
        """Fingerprint of each node's key or secret for the run that this one resumes."""
        return {node: about.resumed_key for node, about in self.nodes.items() if about.resumed_key}

    @property
    def notices(self) -> dict[int, list[str]]:
        """What sites should know of their connected nodes; of others they learn nothing."""
        connected, texts = self._connected, defaultdict[int, list[str]](list)
        for node in self._of_other_versions(connected):
            here = self.nodes[node].version or "an earlier one"
            versions = f"flwr-distill {here} here, {own_version()} on the server"
            texts[node].append(f"{versions} (install the same version)")
        names = ((f"the name {name}", nodes) for name, nodes in self._by_name(connected).items())
        partitions = (
            (f"partition {partition}", nodes)
            for (_, partition), nodes in self._by_partition(connected).items()
        )
        for option, shared in (("--name", names), ("--partition-id", partitions)):
            for what, nodes in shared:
                for node in nodes:
                    text = f"another node has {what} as well (start each with its own {option})"
                    texts[node].append(text)
        able = self.with_codecs
        return {node: own for node, own in texts.items() if node in able}

    @property
    def with_codecs(self) -> dict[int, tuple[str, ...]]:
        """Nodes that code models, whatever app they run, and their codecs."""
        return {node: about.codecs for node, about in self.nodes.items() if about.codecs}

    @property
    def over_networks(self) -> set[int]:
        """Nodes that code models and do not say that their link to the SuperLink is loopback."""
        return {node for node in self.with_codecs if not self.nodes[node].loopback}

    @property
    def together(self) -> dict[int, int]:
        """Partition of each virtual node that trains together with others."""
        return {
            node: about.partition
            for node, about in self.nodes.items()
            if about.together and about.partition is not None
        }

    @property
    def busy(self) -> list[int]:
        """Excluded nodes that did not answer in time."""
        return [node for node, missing in self.excluded.items() if missing == (SILENT,)]

    def not_due(self, server_round: int) -> set[int]:
        """Excluded nodes that are not asked again in this round."""
        return {node for node in self.excluded if not self._retries.due(node, server_round)}

    def meet_new(
        self, grid: Grid, timeout: float, first: Iterable[str] = (), server_round: int = 0
    ) -> list[int]:
        """Ask new nodes who they are, add those that can take part, and return their ids.

        The identities in `first` come first, in that order; then nodes by partition; then others by
        id.
        """
        unknown = [node for node in grid.get_node_ids() if node not in self.nodes]
        answers = self.directory.look_up(grid, unknown, timeout)
        self._settle_class_names(answers)
        missing = {
            node: about.missing or self._odd_classes(about) for node, about in answers.items()
        }
        for node in unknown:
            self.excluded.pop(node, None)
            if missing[node]:
                self.excluded[node] = missing[node]
                self._retries.failed(node, server_round)
        ranks = {identity: rank for rank, identity in enumerate(first)}

        def sort_key(node: int) -> tuple[int, float, int]:
            partition = answers[node].partition
            rank = ranks.get(_identity(node, answers[node]), len(ranks))
            return rank, math.inf if partition is None else partition, node

        able = sorted((node for node in unknown if not missing[node]), key=sort_key)
        self.nodes |= {node: answers[node] for node in able}
        connected = [node for node in grid.get_node_ids() if node in self.nodes]
        if unknown or connected != self._connected:
            self._warn(connected)
            self._connected = connected
        return able

    def check_class_names(self) -> None:
        """Raise SettingsError if nodes name the classes, and disagree."""
        if len(set(self._stated.values())) < 2:
            return
        folders = {self.directory.name(node): (listed(n),) for node, n in self._stated.items()}
        names = in_order(name for names in self._stated.values() for name in names)
        shown = ",".join(names[:MAX_CLASSES]) + ",..." * (len(names) > MAX_CLASSES)
        raise SettingsError(
            f"nodes have different class folders: {'; '.join(by_reason(folders))}",
            where="private.classes",
            value="",
            remedy=f'set private.classes="{shown}"',
        )

    def _settle_class_names(self, answers: Mapping[int, Description]) -> None:
        """Take the class names of most nodes that name classes and can take part."""
        if self.directory.class_names:
            return
        self._stated = {n: about.class_names for n, about in answers.items() if about.class_names}
        able = Counter(
            names
            for node, names in self._stated.items()
            if not answers[node].missing and self.num_classes in (None, len(names))
        )
        for names, votes in able.most_common(1):
            if 2 * votes > able.total():
                self.directory.class_names = names
                log(INFO, "Classes, as most nodes name them: %s", listed(names))

    def _odd_classes(self, about: Description) -> tuple[str, ...]:
        """Why a node's classes, or their names, do not fit this run; empty if they do."""
        last = max(about.classes or (), default=0)
        if self.num_classes is not None and last >= self.num_classes:
            # Where classes count alike, made-up ones would make its word that of all.
            return (f"it has a class {last}, and the run's end at {self.num_classes - 1}",)
        run = self.directory.class_names
        if about.class_names in ((), run):
            return ()
        if not run:
            return ("nodes name classes differently, and no names have a majority",)
        difference = LabelMap(about.class_names).difference(LabelMap(run))
        return (f"{difference} (rename its class folders, or set private.classes to all names)",)

    def _warn(self, connected: Sequence[int]) -> None:
        faults = [
            *self._other_versions(connected),
            *self._shared_names(connected),
            *self._shared_partitions(connected),
            *self._data_of_another_kind(connected),
            *self._classes_of_nobody(),
            *self._very_large_nodes(connected),
        ]
        for text in faults:
            if text not in self.warnings:
                log(WARNING, "%s", text)
        names = {self.directory.name(node): missing for node, missing in self.excluded.items()}
        self.warnings = [*(f"Cannot take part: {line}" for line in by_reason(names)), *faults]

    def _of_other_versions(self, connected: Sequence[int]) -> list[int]:
        """Nodes with another version of our package than the server's."""
        own, able = own_version(), self.with_codecs
        return [n for n in connected if own and n in able and self.nodes[n].version != own]

    def _by_name(self, connected: Sequence[int]) -> dict[str, list[int]]:
        """The nodes of each name that several have."""
        names = ((self.nodes[node].name, node) for node in connected)
        return _shared((name, node) for name, node in names if name)

    def _by_partition(self, connected: Sequence[int]) -> dict[tuple[str, int], list[int]]:
        """The nodes of each partition of a data set that several have."""
        about = ((node, self.nodes[node]) for node in connected)
        return _shared(
            ((each.dataset, each.partition), node)
            for node, each in about
            if each.partition is not None
        )

    def _other_versions(self, connected: Sequence[int]) -> list[str]:
        nodes: dict[str, list[str]] = defaultdict(list)
        for node in self._of_other_versions(connected):
            version = self.nodes[node].version or "an earlier one"
            nodes[version].append(self.directory.name(node))
        return [
            f"{listed(sorted(names))}: flwr-distill {version} there, {own_version()} on the server "
            "(install the same version)"
            for version, names in nodes.items()
        ]

    def _shared_names(self, connected: Sequence[int]) -> list[str]:
        return [
            f"{listed(sorted(map(self.directory.name, nodes)))} have the same name, {own} "
            "(start each with a --name of its own)"
            for own, nodes in self._by_name(connected).items()
        ]

    def _shared_partitions(self, connected: Sequence[int]) -> list[str]:
        return [
            f"{listed([*map(self.directory.name, nodes)])} have the same partition, {partition}, "
            "and may hold the same samples (start each with a --partition-id of its own)"
            for (_, partition), nodes in self._by_partition(connected).items()
        ]

    def _data_of_another_kind(self, connected: Sequence[int]) -> list[str]:
        """A warning about nodes with data of their own, where the server tests on a named set."""
        own = [
            self.directory.name(node)
            for node in connected
            if self.nodes[node].partition is None and not self.nodes[node].dataset
        ]
        if not self.tested or not own:
            return []
        return [
            f"{listed(own)} train on data of their own, and the server tests on the run's data set "
            '(set dataset="private", unless theirs are of the same kind)'
        ]

    def _very_large_nodes(self, connected: Sequence[int]) -> list[str]:
        """A warning about nodes of which less than half of the samples count."""
        count = self.directory.samples(connected)
        large = [node for node in connected if self.nodes[node].num_examples > 2 * count[node]]
        if not large:
            return []
        names, most = listed([self.directory.name(node) for node in large]), max(count.values())
        return [
            f"{names} claim far more samples than other nodes: these count at most "
            f"{most:,} each (set most-samples=0 if you trust their claims)"
        ]

    def _classes_of_nobody(self) -> list[str]:
        """A warning about classes of the test set that no node has, if all nodes say theirs."""
        classes_of_nodes = [about.classes for about in self.nodes.values()]
        if not classes_of_nodes or None in classes_of_nodes:
            return []
        known = {label for classes in classes_of_nodes for label in classes or ()}
        missing = [label for label in self.tested if label not in known]
        if not missing:
            return []
        classes = listed([self.directory.class_name(label) for label in missing])
        return [
            f"No node holds {'class' if len(missing) == 1 else 'classes'} {classes}, so the model "
            "cannot learn what the test set has of it (let nodes hold all classes: partition.*, or "
            "more nodes)"
        ]


def meet_nodes(
    grid: Grid,
    roster: Roster,
    min_nodes: int,
    timeout: float,
    first: Iterable[str] = (),
    *,
    patience: float = 0.0,
    on_wait: Callable[[int], None] = lambda _: None,
) -> None:
    """Wait for `min_nodes` nodes, and add all connected ones that can take part to the roster.

    Nodes that are busy with other runs do not answer. Where too few others are left, they are asked
    again for `patience` seconds. `on_wait` is called meanwhile with the number that is missing.

    Raises TooFewNodesError if fewer nodes connect within `timeout` seconds, or can take part, and
    SettingsError if their class folders differ, and no setting names classes.
    """
    nodes = connected_nodes(grid, min_nodes, timeout, on_wait)
    deadline = time.monotonic() + patience
    roster.meet_new(grid, timeout, first)
    while len(roster.nodes) < min_nodes and roster.busy and time.monotonic() < deadline:
        left = deadline - time.monotonic()
        log(INFO, "Waiting for %s, %.0f s left", counted(len(roster.busy), "busy node"), left)
        on_wait(min_nodes - len(roster.nodes))
        time.sleep(random.uniform(*_PAUSE))
        roster.meet_new(grid, min(timeout, left), first)
    if len(roster.nodes) < min_nodes:
        roster.check_class_names()
        missing = {roster.directory.name(node): why for node, why in roster.excluded.items()}
        raise TooFewNodesError(
            f"min-nodes = {min_nodes}, but only {len(roster.nodes)} of "
            f"{counted(len(nodes), 'node')} can take part: {'; '.join(by_reason(missing))} (give "
            "these nodes what is missing, or lower min-nodes)"
        )
    if not roster.directory.class_names:
        log(INFO, "Neither run nor nodes name the classes: they are called by their positions")
    num_examples = sum(about.num_examples for about in roster.nodes.values())
    log(INFO, "%s: %d training samples", counted(len(roster.nodes), "node"), num_examples)


def _identity(node: int, about: Description) -> str:
    own = about.name or str(node) if about.partition is None else str(about.partition)
    return f"{about.dataset}/{own}" if about.dataset else own


def _shared(pairs: Iterable[tuple[K, int]]) -> dict[K, list[int]]:
    """The nodes of each key that several have."""
    nodes: dict[K, list[int]] = defaultdict(list)
    for key, node in pairs:
        nodes[key].append(node)
    return {key: own for key, own in nodes.items() if len(own) > 1}
