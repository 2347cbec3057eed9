"""What happens when the head of a cluster or the leader of a sector is lost: another takes over."""

from collections.abc import Callable, Sequence
from logging import WARNING

from flwr.common import log


def successor(lost: int, able: Sequence[int], choose: Callable[[Sequence[int]], int]) -> int | None:
    """Find who leads in place of a node that is gone or failed, and say so in the log.

    Parameters
    ----------
    lost : int
        Node id of the leader that is lost.
    able : Sequence[int]
        Other nodes of its cluster that can lead.
    choose : callable
        Takes one of these, where there are any.

    Returns
    -------
    int or None
        None where nobody is able: the cluster takes no part until somebody is.
    """
    if not able:
        log(WARNING, "Node %d no longer leads its cluster, and no other node is able to", lost)
        return None
    leader = choose(able)
    log(WARNING, "Node %d takes over from node %d, which no longer leads its cluster", leader, lost)
    return leader
