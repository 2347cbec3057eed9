"""Asks heads how well other heads' models know their members' virtual data (`hfldd.votes`)."""

from collections.abc import Mapping
from functools import cache
from logging import WARNING

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from flwr_distill.protocol.arrays import Arrays, as_record
from flwr_distill.protocol.messages import CONFIG, METRICS
from flwr_distill.protocol.replies import set_aside, usable
from flwr_distill.strategies.common.directory import Directory
from flwr_distill.strategies.hfldd.clusters import Clusters, LiveCluster
from flwr_distill.strategies.hfldd.method import KNOWN, RANKS, VOTE, VOTER, VoteMetrics
from flwr_distill.strategies.hfldd.votes import contradicted, verdicts, voters
from flwr_distill.task.errors import SettingsError

FEWEST_CLUSTERS = 3
"""Clusters for votes to be more than one's word against the other's."""
ALARM = (
    "Virtual data of node %d may be spoiled, or the only other cluster, whose model contradicts "
    "them (nothing is left out)"
)
OUT = "Virtual data of node %d are voted out: heads' models contradict them"


def hold_vote(
    clusters: Clusters,
    models: Mapping[int, Arrays],
    directory: Directory,
    grid: Grid,
    server_round: int,
    timeout: float,
) -> None:
    """Have models vote on virtual data that another head has and nobody has judged.

    Verdicts are noted in the clusters: what is voted out is left out from the next round on. While
    models know too little there are none, and the next round asks again. Two clusters leave out
    nothing. A head that does not pass on the votes on its members has failed.

    Parameters
    ----------
    clusters : Clusters
        All clusters.
    models : Mapping[int, Mapping[str, ndarray]]
        The round's usable models, by head.
    directory : Directory
        Knows which classes nodes hold.
    grid : Grid
        Where heads are asked.
    server_round : int
        The round, for the draw of voters.
    timeout : float
        Seconds to wait for the votes.
    """
    asking = [c for c in clusters if c.head in models and c.undecided]
    if len(models) == 1 or not asking:
        return
    classes = _classes_by_head(clusters, models, directory, grid, timeout)
    lent = cache(lambda head: as_record(models[head]))
    messages, chosen = [], {}
    for place, cluster in enumerate(asking):
        generator = np.random.default_rng([clusters.seed, server_round, place])
        chosen[cluster.head] = of_cluster = voters(cluster.head, classes, generator)
        ranks = [cluster.nodes.index(node) for node in cluster.undecided]
        known = {f"{KNOWN}.{i}": classes[voter] for i, voter in enumerate(of_cluster)}
        records = {f"{VOTER}.{i}": lent(voter) for i, voter in enumerate(of_cluster)}
        content = RecordDict({CONFIG: ConfigRecord({RANKS: ranks, **known}), **records})
        messages.append(Message(content, cluster.head, VOTE))
    votes = {}
    by_head = clusters.by_head()
    for reply in usable(grid.send_and_receive(messages, timeout=timeout)):
        head = reply.metadata.src_node_id
        try:
            votes[head] = _votes_of(reply, by_head[head], len(chosen[head]))
        except (KeyError, SettingsError, ValueError):
            set_aside(grid, head, VOTE, "its votes are not what was asked for")
    clusters.failed |= chosen.keys() - votes.keys()
    note_verdicts(votes, by_head, decisive=len(models) >= FEWEST_CLUSTERS)


def _classes_by_head(
    clusters: Clusters,
    models: Mapping[int, Arrays],
    directory: Directory,
    grid: Grid,
    timeout: float,
) -> dict[int, list[int]]:
    """Classes that the cluster of each head holds; all, if one of its nodes does not say."""
    connected = set(grid.get_node_ids())
    voting = [cluster for cluster in clusters if cluster.head in models]
    nodes = [node for cluster in voting for node in cluster.nodes if node in connected]
    about = directory.look_up(grid, nodes, timeout)
    classes = {}
    for cluster in voting:
        held = [about[node].classes if node in about else None for node in cluster.nodes]
        told = {label for labels in held for label in labels or ()}
        classes[cluster.head] = sorted(range(clusters.label_shape[-1]) if None in held else told)
    return classes


def _votes_of(reply: Message, cluster: LiveCluster, num_voters: int) -> dict[int, list[float]]:
    """Votes on each member's parcel that was undecided; ValueError if they are too few or many."""
    votes = VoteMetrics.checked(reply.content.metric_records[METRICS], METRICS).votes
    if len(votes) != num_voters * len(cluster.undecided):
        raise ValueError(f"{len(votes)} votes")
    return {node: votes[i * num_voters :][:num_voters] for i, node in enumerate(cluster.undecided)}


def note_verdicts(
    votes: Mapping[int, Mapping[int, list[float]]],
    by_head: Mapping[int, LiveCluster],
    *,
    decisive: bool,
) -> None:
    """Note and log what is left out; votes that are not decisive raise an alarm at most."""
    for node in [] if decisive else contradicted(votes):
        log(WARNING, ALARM, node)
    for head, of_head in verdicts(votes).items():
        for node, is_out in of_head.items():
            by_head[head].verdicts.setdefault(head, {})[node] = is_out and decisive
            if is_out and decisive:
                log(WARNING, OUT, node)
