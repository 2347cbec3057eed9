"""Time and memory of clustering on the server: CADIS with 10,000 clients, HFLDD with up to 10,000.

``python -m benchmarks.clustering [--quick] [--json FILE]``

CADIS: 1 % of the clients, redrawn each round; from the changes of their last layer (10 x 512) to
their weights, median of five rounds after 100 (``--quick``), 500 and 1,000 others. HFLDD: the KL
matrix of soft labels (1,000 samples, 10 classes), and K-means with K = 10 on its rows; with
``--quick`` up to 1,000 clients. Peak memory is of one process per row, with Python and Flower.
"""

import argparse
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.figures import write_json
from flwr_distill.strategies.cadis.similarity import (
    KnownPairs,
    aggregation_weights,
    clusters,
    estimated_links,
    instance_similarity,
    similarity_of_a_cluster,
    threshold,
)
from flwr_distill.strategies.hfldd.clustering import homogeneous_groups, kl_matrix

CLIENTS = 10_000
PARTICIPANTS = 100
GROUPS = 10
LAYER = 10 * 512
ROUNDS_BEFORE = (100, 500, 1_000)
ROUNDS_TIMED = 5
HFLDD_CLIENTS = (100, 1_000, 10_000)
SAMPLES, CLASSES = 1_000, 10
Row = dict[str, float]


def cadis(rounds_before: int) -> Row:
    """Time CADIS's rounds; clients form ten clusters of similar changes."""
    generator = np.random.default_rng(0)
    directions = generator.normal(size=(GROUPS, LAYER))
    known, seconds = KnownPairs(), []
    for server_round in range(1, rounds_before + ROUNDS_TIMED + 1):
        participants = np.sort(generator.choice(CLIENTS, PARTICIPANTS, replace=False))
        noise = 0.05 * generator.normal(size=(PARTICIPANTS, LAYER))
        changes = (directions[participants % GROUPS] + noise).astype(np.float32)
        start = time.perf_counter()
        known = known.after(participants, instance_similarity(changes))
        if server_round <= rounds_before:
            continue
        needed = similarity_of_a_cluster(known.peaks, threshold(server_round))
        estimated = estimated_links(
            known.rows(participants, CLIENTS), participants, needed, generator
        )
        cluster_of = clusters(CLIENTS, known.links(needed), estimated)
        aggregation_weights(cluster_of[participants], np.ones(PARTICIPANTS))
        seconds.append(time.perf_counter() - start)
    return {"seconds": statistics.median(seconds), "pairs": len(known.keys), "peak_mb": peak_mb()}


def hfldd(num_clients: int) -> Row:
    """Time HFLDD's groups; each client is best at one of ten classes."""
    generator = np.random.default_rng(0)
    soft_labels = generator.random((num_clients, SAMPLES, CLASSES), dtype=np.float32)
    best = np.arange(num_clients) % CLASSES
    soft_labels[np.arange(num_clients), :, best] += 1
    soft_labels /= soft_labels.sum(axis=-1, keepdims=True)
    start = time.perf_counter()
    divergence = kl_matrix(soft_labels)
    between = time.perf_counter()
    homogeneous_groups(divergence, GROUPS, seed=0)
    end = time.perf_counter()
    return {"kl_seconds": between - start, "k_means_seconds": end - between, "peak_mb": peak_mb()}


def peak_mb() -> float:
    """Peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def alone(measure: Callable[[], Row]) -> Row:
    """Measure in a separate process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(measure).result()


def main() -> None:
    """Measure, print the tables and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="within a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the figures")
    arguments = parser.parse_args()
    console = Console()

    rounds = Table("CADIS: rounds before", "known pairs", "seconds a round", "peak [MB]")
    cadis_rows = {}
    for before in ROUNDS_BEFORE[:1] if arguments.quick else ROUNDS_BEFORE:
        row = cadis_rows[before] = alone(partial(cadis, before))
        cells = (f"{row['pairs']:,}", f"{row['seconds']:.3f}", f"{row['peak_mb']:.0f}")
        rounds.add_row(f"{before:,}", *cells)
    console.print(rounds)

    groups = Table("HFLDD: clients", "KL matrix [s]", "K-means [s]", "peak [MB]")
    hfldd_rows = {}
    for clients in HFLDD_CLIENTS[:2] if arguments.quick else HFLDD_CLIENTS:
        row = hfldd_rows[clients] = alone(partial(hfldd, clients))
        seconds = (f"{row['kl_seconds']:.3f}", f"{row['k_means_seconds']:.3f}")
        groups.add_row(f"{clients:,}", *seconds, f"{row['peak_mb']:.0f}")
    console.print(groups)

    most = cadis_rows[max(cadis_rows)]
    figures = {
        "cadis_q_10k_seconds": most["seconds"],
        "cadis_q_10k_peak_mb": most["peak_mb"],
        "cadis": cadis_rows,
        "hfldd": hfldd_rows,
    }
    write_json(arguments.json, figures)


if __name__ == "__main__":
    main()
