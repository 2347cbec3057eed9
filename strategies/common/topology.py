"""Clusters of nodes, with a head each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Cluster:
    """A cluster head and the members that send it their virtual data.

    Parameters
    ----------
    head : int
        Node id of the cluster head.
    members : tuple[int, ...]
        Node ids of the other nodes of the cluster.
    """

    head: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class Topology:
    """The clusters of a federation, and the homogeneous groups that they were drawn from.

    Parameters
    ----------
    clusters : tuple[Cluster, ...]
        Every node is head or member of exactly one.
    groups : tuple[tuple[int, ...], ...]
        Node ids of each homogeneous group.
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
