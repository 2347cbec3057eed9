"""Votes on virtual data: models that never saw them judge them, and heads leave some out."""

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from logging import WARNING
from statistics import median, median_high

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
from flwr_distill.task.errors import SettingsError

MAX_VOTERS = 3
"""Models that vote on a head's virtual data; of three, one may be spoiled itself."""
CHANCE = 0.5
"""Vote of a model that knows nothing of a parcel, or on a parcel whose labels mean nothing."""
CLEAR = 0.6
"""Usual vote from which on models know enough to vote; digits have .69 after the first round."""

CONTRADICTED = 0.4
"""Vote of one that knows better: flipped labels of digits have 0.22 to 0.39."""
MIN_CLUSTERS = 3
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
    """Have models, given by head, vote on virtual data that another head has and nobody has judged.

    Verdicts are noted in the clusters, and heads leave out what is voted out from the next round
    on. While models know too little there are none, and the next round tries again. Two clusters
    leave out nothing. A head that does not pass on the votes on its members has failed.
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
        ranks = cluster.ranks(cluster.undecided)
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
            set_aside(grid, head, VOTE, "its votes do not fit the request")
    clusters.failed |= chosen.keys() - votes.keys()
    note_verdicts(votes, by_head, decisive=len(models) >= MIN_CLUSTERS)


def _classes_by_head(
    clusters: Clusters,
    models: Mapping[int, Arrays],
    directory: Directory,
    grid: Grid,
    timeout: float,
) -> dict[int, list[int]]:
    """Classes of the cluster of each head; all, if one of its nodes does not say."""
    connected = set(grid.get_node_ids())
    voting = [cluster for cluster in clusters if cluster.head in models]
    nodes = [node for cluster in voting for node in cluster.nodes if node in connected]
    about = directory.look_up(grid, nodes, timeout)
    classes = {}
    for cluster in voting:
        held = [about[node].classes if node in about else None for node in cluster.nodes]
        known = {label for labels in held for label in labels or ()}
        classes[cluster.head] = sorted(range(clusters.label_shape[-1]) if None in held else known)
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


def contradicted(votes: Mapping[int, Mapping[int, Sequence[float]]]) -> list[int]:
    """Members whose labels all voters find clearly less likely than chance; see `verdicts`.

    Of two clusters either may be spoiled: a spoiled model contradicts honest data as well.
    """
    return [
        node
        for of_head in votes.values()
        for node, given in of_head.items()
        if max(given) < CONTRADICTED
    ]


def verdicts(votes: Mapping[int, Mapping[int, Sequence[float]]]) -> dict[int, dict[int, bool]]:
    """Whose virtual data are voted out, by head and member; empty while models know too little.

    `votes` are those in [0, 1] on each member's parcel, by head and member. A parcel's score is
    their median, the higher one of two. It is out if its score lies within the first quarter of the
    way from chance to the usual one. Usual is the median over heads of the median over the head's
    parcels, so that a head that lies about its members counts once.
    """
    scores = {
        head: {node: median_high(given) for node, given in of_head.items()}
        for head, of_head in votes.items()
        if of_head
    }
    usual = median(median(of_head.values()) for of_head in scores.values()) if scores else CHANCE
    if usual < CLEAR:
        return {}
    least = CHANCE + (usual - CHANCE) / 4
    return {
        head: {node: score < least for node, score in of_head.items()}
        for head, of_head in scores.items()
    }


def voters(
    head: int, classes: Mapping[int, Collection[int]], generator: np.random.Generator
) -> list[int]:
    """Heads whose models vote on virtual data of the members of another head, which does not vote.

    Those of other clusters with most of its classes; equals are drawn. `classes` are those of the
    cluster of each head with a usable model.
    """
    others = [other for other in classes if other != head]
    drawn = [others[int(place)] for place in generator.permutation(len(others))]
    drawn.sort(key=lambda other: -len({*classes[other]} & {*classes[head]}))
    return drawn[:MAX_VOTERS]
