"""Replacement of lost cluster heads and sector leaders."""

from collections.abc import Callable, Sequence
from logging import WARNING

from flwr.common import log


def successor(lost: int, able: Sequence[int], choose: Callable[[Sequence[int]], int]) -> int | None:
    """Choose and log the new leader of a cluster; None if no node is able, until one is."""
    if not able:
        log(WARNING, "Node %d no longer leads its cluster, and no other node is able to", lost)
        return None
    leader = choose(able)
    log(WARNING, "Node %d takes over from node %d, which no longer leads its cluster", leader, lost)
    return leader
