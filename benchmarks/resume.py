"""Kill the ServerApp with SIGKILL at random moments, resume, compare with an undisturbed run.

``python -m benchmarks.resume [--strategy NAME] [--kills N] [--quick] [--json FILE]``

Uses one SuperLink and real nodes. The final models must be equal to the last bit.
"""

import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Annotated

import grpc
import numpy as np
import psutil
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.figures import read_lines, write_json
from flwr_distill.fleet.local_federation import LocalFederation
from flwr_distill.fleet.submission import RunError

APP = Path(__file__).resolve().parent.parent
NODES = 4
ROUNDS = 8
STRATEGIES = ["hfldd", "fedhead", "cadis", "fedlgd"]
SETTINGS = {
    "num-rounds": ROUNDS,
    "min-nodes": NODES,
    "partition.scheme": "dirichlet",
    "hfldd.groups": 2,
    "hfldd.distill-steps": 20,
    "fedlgd.every": 2,
}


def measure(strategy: str, kills: int, federation: LocalFederation, runs: Path) -> dict[str, float]:
    """Kill and resume a strategy's runs; count equal models, and median seconds."""
    generator = np.random.default_rng(0)
    settings = {**SETTINGS, "strategy": strategy}
    start = time.monotonic()
    alone = _complete(federation, runs / strategy / "alone", settings)
    seconds_alone, seconds, same = time.monotonic() - start, [], 0
    for number in range(kills):
        folder = runs / strategy / f"killed-{number}"
        start = time.monotonic()
        rounds = _killed(federation, folder, settings, generator)
        resumed = _complete(federation, folder, {**settings, "resume": "latest"})
        seconds.append(time.monotonic() - start)
        same += resumed == alone
        print(f"{strategy}: killed after {rounds} rounds and a part; same: {resumed == alone}")
        if resumed != alone:
            print("\n".join(_warnings(folder)))
    return {
        "kills": kills,
        "same": same,
        "seconds_alone": seconds_alone,
        "seconds_killed": median(seconds),
    }


def _complete(federation: LocalFederation, runs: Path, settings: dict[str, object]) -> bytes:
    """Run to the end; return the final model."""
    outcome = federation.run(APP, {**settings, "runs-dir": str(runs)})
    if not outcome.completed:
        raise RuntimeError("\n".join(outcome.lines[-30:]))
    (folder,) = runs.iterdir()
    return (folder / "model.safetensors").read_bytes()


def _killed(
    federation: LocalFederation,
    runs: Path,
    settings: dict[str, object],
    generator: np.random.Generator,
) -> int:
    """Submit a run, kill its ServerApp in a random round; return the rounds before."""
    before = {process.pid for process in _server_apps(federation)}
    config = {**settings, "runs-dir": str(runs)}
    threading.Thread(target=_follow, args=(federation, config), daemon=True).start()
    done = int(generator.integers(ROUNDS))
    while (rows := _rows(runs)) <= done:
        time.sleep(0.02)
    time.sleep(generator.uniform(0, 1.0))
    (server_app,) = [p for p in _server_apps(federation) if p.pid not in before]
    server_app.kill()
    return rows - 1


def _follow(federation: LocalFederation, config: dict[str, object]) -> None:
    """Submit a run that will be killed: Flower notices after 50 s, or the federation ends first."""
    with suppress(RunError, grpc.RpcError):
        federation.run(APP, config)


def _rows(runs: Path) -> int:
    """Rounds recorded, including the initial model."""
    return sum(len(file.read_text().splitlines()) for file in runs.glob("*/metrics.jsonl"))


def _warnings(runs: Path) -> list[str]:
    """Warnings of the run's journal."""
    (journal,) = runs.glob("*/journal.jsonl")
    lines = [line for line in read_lines(journal) if "warning" in line]
    return [f"  round {line['round']}: {line['warning']}" for line in lines]


def _server_apps(federation: LocalFederation) -> list[psutil.Process]:
    children = psutil.Process(federation.serverapps_pid).children(recursive=True)
    alive = (p for p in children if p.status() != psutil.STATUS_ZOMBIE)
    return [p for p in alive if p.name().startswith("flwr-serverapp")]


def main(
    strategies: Annotated[list[str] | None, typer.Option("--strategy", help="Again for more.")] = (
        None
    ),
    kills: Annotated[int, typer.Option(min=1, help="Of each strategy's run.")] = 10,
    quick: Annotated[bool, typer.Option(help="One kill of each, within 5 minutes.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to write.")] = None,
) -> None:
    """Kill ServerApps at random moments, resume, and compare with undisturbed runs."""
    table = Table(title=f"{NODES} nodes, {ROUNDS} rounds, ServerApp killed at random and resumed")
    for column in ("strategy", "kills", "same model", "seconds alone", "seconds killed + resumed"):
        table.add_column(column, justify="left" if column == "strategy" else "right")
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        state, runs = Path(folder) / "state", Path(folder) / "runs"
        with LocalFederation(NODES, state) as federation:
            for strategy in strategies or STRATEGIES:
                figures = measure(strategy, 1 if quick else kills, federation, runs)
                results[strategy] = figures
                table.add_row(
                    strategy,
                    f"{figures['kills']}",
                    f"{figures['same']}",
                    f"{figures['seconds_alone']:.0f}",
                    f"{figures['seconds_killed']:.0f}",
                )
    Console().print(table)
    write_json(json_file, results)
    if any(figures["same"] < figures["kills"] for figures in results.values()):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
