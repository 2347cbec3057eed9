"""Runs of the papers' tables: they resume where they ended, and their folders have the results."""

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from shutil import rmtree
from statistics import fmean
from typing import Any

from flwr.app import Message, RecordDict

from benchmarks.figures import read_lines
from benchmarks.in_process import Settings, only_errors, run_in_process
from benchmarks.papers.tables import Row
from flwr_distill.server.record.checkpoint import checkpoints
from flwr_distill.simulation.grid import Node
from flwr_distill.simulation.run import simulate
from flwr_distill.task.plugin import import_object

ALL = "all"
"""Key of the seconds of a whole run, with the server's."""
FEDAVG = "fedavg"
ROOT, INDEX_FILE = "data-root", "partition.index-file"
WITH_MODELS = ("train", "train.aggregate_sector", "train.distill_sector")
"""Phases in which the server exchanges models with nodes, also where nodes are linked directly."""


def run_row(
    row: Row,
    seed: int,
    folder: Path,
    data_root: str,
    show: Callable[[], None],
    workers: int | None,
) -> None:
    """Run a row, or continue it after its last round; calls `show` at each message to a node.

    The nodes' files are removed when it is over.
    """
    spent = defaultdict(float, Result(folder).seconds)

    def book(message: Message, taken: float) -> None:
        show()
        for purpose in (message.metadata.message_type, ALL):
            spent[purpose] += taken

    def watched(place: int, node: Node) -> Node:
        def answer(message: Message) -> RecordDict | None:
            show()
            with booked(spent, message.metadata.message_type):
                return node(message)

        return answer

    resume = "latest" if checkpoints(folder / "1") else ""
    config = {**below(row.seeded(seed), data_root), "resume": resume}
    folder.mkdir(parents=True, exist_ok=True)
    if ":" in (dealt := str(config.get(INDEX_FILE, ""))):
        indices: Any = import_object(dealt)
        config[INDEX_FILE] = str(folder / "indices.json")
        (folder / "indices.json").write_text(json.dumps(indices(Path(data_root))))
    try:
        with booked(spent, ALL), only_errors():
            if workers == 1:
                run_in_process(config, row.nodes, folder, watched)
            else:
                simulate(config, row.nodes, folder, workers=workers, run_id=1, on_answer=book)
        # Up to a gigabyte, which only an interrupted run needs.
        rmtree(folder / "nodes", ignore_errors=True)
    finally:
        (folder / "seconds.json").write_text(json.dumps(spent))


def below(settings: Settings, data_root: str) -> dict[str, Any]:
    """Settings with the paths of their data, which tables give below `data_root`."""
    folder = "/".join(filter(None, (data_root, str(settings.get(ROOT, "")))))
    index_file = str(settings.get(INDEX_FILE, ""))
    found = index_file if ":" in index_file or not index_file else f"{folder}/{index_file}"
    return {**settings, ROOT: folder, INDEX_FILE: found}


@contextmanager
def booked(spent: dict[str, float], purpose: str) -> Iterator[None]:
    """Add the seconds of a core that the block takes."""
    start = time.process_time()
    try:
        yield
    finally:
        spent[purpose] += time.process_time() - start


@dataclass(frozen=True)
class Result:
    """What a run's folder has, as far as it ran; accuracies are in percent."""

    folder: Path

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Lines of ``metrics.jsonl``, from round 0 on."""
        return _lines(self.folder / "1" / "metrics.jsonl")

    @property
    def rounds(self) -> int:
        """Finished rounds."""
        file = self.folder / "1" / "metrics.jsonl"
        return max(0, file.read_bytes().count(b"\n") - 1) if file.exists() else 0

    @property
    def by_round(self) -> list[float | None]:
        """Accuracy by round, from 0 on; the nodes' mean where there is no other."""
        shares = [
            row["node_accuracy" if row["accuracy"] is None else "accuracy"] for row in self.rows
        ]
        return [None if share is None else round(100 * share, 2) for share in shares]

    @property
    def by_node(self) -> list[list[float | None]]:
        """Accuracy of each node, in the order of their places, by round from 1 on."""
        by_id: dict[int, dict[int, float]] = defaultdict(dict)
        for line in _lines(self.folder / "1" / "journal.jsonl"):
            for node, numbers in line.get("nodes", {}).items():
                evaluated = by_id[int(node)]
                if line["phase"].partition(".")[0] == "evaluate" and "eval-accuracy" in numbers:
                    evaluated[line["round"]] = round(100 * numbers["eval-accuracy"], 2)
        rounds = range(1, self.rounds + 1)
        return [[by_id[node].get(number) for number in rounds] for node in sorted(by_id)]

    def measured_bytes(self, rounds: int) -> int:
        """Bytes through the server and between nodes in the first rounds."""
        return int(self.rows[rounds]["server_bytes"] + self.rows[rounds]["link_bytes"])

    def formula_bytes(self, rounds: int) -> float | None:
        """Traffic of the first rounds by HFLDD's eq. 3, 18 or 19; None until the run is over.

        The run's own files have it for all its rounds; a round less has fewer models.
        """
        file = self.folder / "1" / "traffic.json"
        formulas = json.loads(file.read_text())["formulas"] if file.exists() else {}
        settings = self._json("settings.json")
        strategy = settings.get("strategy", "")
        by_name = {name.partition(" ")[0]: size for name, size in formulas.items()}
        if FEDAVG not in by_name:
            return None
        nodes, last = int(settings["min-nodes"]), int(settings["num-rounds"])
        weights = by_name[FEDAVG] / (nodes * (2 * last - 1))  # bytes of a model
        clusters = len(self._json("topology.json").get("clusters", []))
        ring = clusters * (nodes // clusters) if clusters else 0
        transfers = {FEDAVG: 2 * nodes, "hfldd": 2 * clusters, "fedseq": 2 * clusters + ring}
        name = strategy if strategy in by_name.keys() & transfers.keys() else FEDAVG
        return float(by_name[name] - (last - rounds) * transfers[name] * weights)

    @property
    def round_trips(self) -> int:
        """Exchanges of models of the server with nodes so far (FedHEAD, table 1)."""
        lines = _lines(self.folder / "1" / "journal.jsonl")
        return sum(line["asked"] for line in lines if line.get("phase") in WITH_MODELS)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds that it took so far, by type of message, and in all.

        Of a core if nodes ran in the server's process, else of a worker, beside the server's core.
        """
        file = self.folder / "seconds.json"
        spent: dict[str, float] = json.loads(file.read_text()) if file.exists() else {}
        return spent

    def _json(self, name: str) -> dict[str, Any]:
        file = self.folder / "1" / name
        return dict(json.loads(file.read_text())) if file.exists() else {}


def _lines(file: Path) -> list[dict[str, Any]]:
    return read_lines(file) if file.exists() else []


def last(accuracies: Sequence[float]) -> float:
    """Accuracy after the last round."""
    return accuracies[-1]


def last_ten(accuracies: Sequence[float]) -> float:
    """Mean of the last ten rounds."""
    return fmean(accuracies[-10:])


METRICS: dict[str, Callable[[Sequence[float]], float]] = {
    "last": last,
    "best": max,
    "last-ten": last_ten,
}
"""From accuracies by round, from 1 on, to what a paper prints."""


def rounds_to(accuracies: Sequence[float | None], target: float) -> int | None:
    """First round, from 0 on, whose accuracy is at least the target; None if there is none."""
    return next((n for n, a in enumerate(accuracies) if a is not None and a >= target), None)
