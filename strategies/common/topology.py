"""Clusters of nodes, with a head each, and who succeeds a lost head."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from logging import WARNING
from typing import Any

from flwr.common import log


@dataclass(frozen=True)
class Cluster:
    """A cluster head, and the other nodes of its cluster."""

    head: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class Topology:
    """The clusters of a federation, and the homogeneous groups that they were drawn from.

    Every node is head or member of exactly one cluster.
    """

    clusters: tuple[Cluster, ...]
    groups: tuple[tuple[int, ...], ...]

    @property
    def heads(self) -> tuple[int, ...]:
        """Node ids of the cluster heads."""
        return tuple(cluster.head for cluster in self.clusters)

    @property
    def head_of(self) -> dict[int, int]:
        """Head of each member, without the heads themselves."""
        return {member: c.head for c in self.clusters for member in c.members}

    def to_dict(self, names: Mapping[int, str]) -> dict[str, Any]:
        """Plain data for a JSON file; nodes without a name appear by id."""
        return {
            "clusters": [
                {"head": _named([c.head], names)[0], "members": _named(c.members, names)}
                for c in self.clusters
            ],
            "groups": [_named(group, names) for group in self.groups],
        }


@dataclass(frozen=True)
class FlatClusters:
    """Clusters of nodes without heads."""

    clusters: tuple[tuple[int, ...], ...]

    def to_dict(self, names: Mapping[int, str]) -> dict[str, Any]:
        """Plain data; see :meth:`Topology.to_dict`. Heads are None."""
        clusters = [{"head": None, "members": _named(nodes, names)} for nodes in self.clusters]
        return {"clusters": clusters, "groups": []}


def _named(nodes: Sequence[int], names: Mapping[int, str]) -> list[str]:
    return [names.get(node, str(node)) for node in nodes]


def successor(lost: int, able: Sequence[int], choose: Callable[[Sequence[int]], int]) -> int | None:
    """Choose and log the new leader of a cluster; None if no node is able, until one is."""
    if not able:
        log(WARNING, "Node %d no longer leads its cluster, and no other node is able to", lost)
        return None
    leader = choose(able)
    log(WARNING, "Node %d takes over from node %d, which no longer leads its cluster", leader, lost)
    return leader
