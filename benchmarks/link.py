"""Codecs over a slow link: seconds a round, bytes and accuracy, with real processes.

``python -m benchmarks.link [--quick] [--strategies fedavg hfldd] [--codecs float32 int8 ...]
[--set KEY=VALUE ...] [--nodes N] [--rounds R] [--seeds 0 1 2] [--mbit 5] [--latency 0.08]
[--cut-every 120] [--cut-for 5] [--data-root DIR] [--json FILE]``

A SuperLink and nodes run here; each node reaches the SuperLink over a link of its own of so many
Mbit/s each way, with this round-trip time. All links are cut for some seconds every now and then:
connections break, and new ones are refused. Rows are interleaved: each seed runs all codecs before
the next one does. ``--quick`` is digits with a small network, and no cuts. Bytes are of messages
through the server, both ways, in all rounds; share is of those of ``float32``.
"""

import argparse
import asyncio
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.figures import key_value, read_lines, write_json
from flwr_distill.fleet.local_federation import LocalFederation, free_ports

CODECS = {
    "float32": ("float32", "float32"),
    "float16": ("float16", "float16"),
    "int8": ("int8", "int8"),
    "delta-int8": ("delta-int8", "int8"),
    "delta-int4": ("delta-int4", "int4"),
    "topk": ("delta-int4", "topk"),
    "delta-topk": ("delta-topk", "topk"),
}
"""``down-codec`` and ``up-codec`` by a row's name."""
CHUNK = 1 << 14
"""Bytes that a link takes at once."""
IN_FLIGHT = 16
"""Chunks that may be on the way."""
APP = Path(__file__).resolve().parents[1]
QUICK = {
    "dataset": "digits",
    "model": "digits-cnn",
    "partition.scheme": "dirichlet",
    "partition.alpha": 0.5,
}
CIFAR = {
    "dataset": "cifar10",
    "model": "resnet18",
    "partition.scheme": "dirichlet",
    "partition.alpha": 0.5,
}


class Link:
    """A server on loopback that forwards to another, slowly, and now and then not at all."""

    def __init__(self, mbit: float, latency: float, cut_every: float, cut_for: float) -> None:
        self.target = ("127.0.0.1", 0)
        (self.port,) = free_ports(1)
        self._rate, self._delay = mbit * 1e6 / 8, latency / 2
        self._cuts = cut_every, cut_for
        self._open: set[asyncio.StreamWriter] = set()
        self._is_cut = False
        ready = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self._serve(ready)), daemon=True).start()
        ready.wait(10)

    async def _serve(self, ready: threading.Event) -> None:
        await asyncio.start_server(self._connect, "127.0.0.1", self.port)
        ready.set()
        every, length = self._cuts
        while True:
            await asyncio.sleep(every or 3600)
            if every:
                self._is_cut = True
                for writer in list(self._open):
                    writer.transport.abort()
                await asyncio.sleep(length)
                self._is_cut = False

    async def _connect(self, node: asyncio.StreamReader, to_node: asyncio.StreamWriter) -> None:
        if self._is_cut:
            to_node.transport.abort()
            return
        ends = {to_node}
        try:
            server, to_server = await asyncio.open_connection(*self.target)
            ends.add(to_server)
            self._open |= ends
            async with asyncio.TaskGroup() as both:
                both.create_task(self._forward(node, to_server))
                both.create_task(self._forward(server, to_node))
        except* OSError:
            pass
        finally:
            for writer in ends:
                writer.transport.abort()
            self._open -= ends

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(IN_FLIGHT)

        async def arrive() -> None:
            while (item := await on_the_way.get())[1]:
                await asyncio.sleep(max(0.0, item[0] - time.monotonic()))
                writer.write(item[1])
                await writer.drain()
            writer.transport.abort()

        async with asyncio.TaskGroup() as group:
            group.create_task(arrive())
            free = 0.0
            while part := await reader.read(CHUNK):
                free = max(free, time.monotonic()) + len(part) / self._rate
                await on_the_way.put((free + self._delay, part))
                await asyncio.sleep(max(0.0, free - time.monotonic()))
            await on_the_way.put((0.0, b""))


class Remote(LocalFederation):
    """A federation whose nodes are at the other end of a link."""

    def __init__(self, link: Link, *args: Any, **more: Any) -> None:
        self._link = link
        super().__init__(*args, **more)

    def node_command(self, settings: Path) -> list[str]:
        """The command of a node that connects to the link."""
        values = yaml.safe_load(settings.read_text())
        host, _, port = str(values["superlink"]).rpartition(":")
        self._link.target = (host, int(port))
        settings.write_text(yaml.safe_dump({**values, "superlink": f"{host}:{self._link.port}"}))
        return super().node_command(settings)


def measure(federation: LocalFederation, runs: Path, config: Mapping[str, Any]) -> dict[str, float]:
    """Run once; bytes, the last accuracy, and the median seconds of a round."""
    before = set(runs.glob("*")) if runs.exists() else set()
    outcome = federation.run(APP, {**config, "runs-dir": str(runs)}, timeout=36_000)
    if not outcome.completed:
        raise SystemExit("\n".join(outcome.lines[-20:]))
    (folder,) = set(runs.glob("*")) - before
    rows = read_lines(folder / "metrics.jsonl")
    times = [row["seconds"] for row in rows]
    return {
        "bytes": rows[-1]["server_bytes"],
        "accuracy": statistics.mean(row["accuracy"] for row in rows[-3:]),
        "seconds": statistics.median(b - a for a, b in pairwise(times)),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--strategies", nargs="+", default=["fedavg", "hfldd"])
    parser.add_argument("--codecs", nargs="+", choices=CODECS, default=list(CODECS))
    parser.add_argument("--set", nargs="+", type=key_value, default=[], metavar="KEY=VALUE")
    parser.add_argument("--nodes", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--mbit", type=float, default=5.0)
    parser.add_argument("--latency", type=float, default=0.08, help="round trip, seconds")
    parser.add_argument("--cut-every", type=float, default=120.0)
    parser.add_argument("--cut-for", type=float, default=5.0)
    parser.add_argument("--data-root", default="")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    task = {**(QUICK if args.quick else CIFAR), **dict(args.set)}
    if args.data_root:
        task["data-root"] = args.data_root
    seeds = args.seeds or ([0] if args.quick else [0, 1, 2])
    link = Link(args.mbit, args.latency, 0 if args.quick else args.cut_every, args.cut_for)
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        node = {"data-root": args.data_root} if args.data_root else {}
        with Remote(link, args.nodes, folder / "federation", node_config=node) as federation:
            for seed in seeds:
                for strategy in args.strategies:
                    for name in args.codecs:
                        down, up = CODECS[name]
                        config = {
                            **{**task, "strategy": strategy, "seed": seed},
                            **{"num-rounds": args.rounds, "min-nodes": args.nodes},
                            **{"down-codec": down, "up-codec": up, "phase-timeout": 7200.0},
                        }
                        row = measure(federation, folder / "runs", config)
                        found.setdefault((strategy, name), []).append(row)
                        print(f"seed {seed}, {strategy}, {name}: {row}", flush=True)
    rows: list[dict[str, Any]] = [
        {
            **{"strategy": strategy, "codec": name},
            **{key: statistics.mean(one[key] for one in ones) for key in ones[0]},
        }
        for (strategy, name), ones in found.items()
    ]
    table = Table("strategy", "codec", "MB", "share", "accuracy", "seconds a round")
    for row in rows:
        whole = next((r["bytes"] for r in rows if r["strategy"] == row["strategy"]), row["bytes"])
        table.add_row(
            str(row["strategy"]),
            str(row["codec"]),
            f"{row['bytes'] / 1e6:.2f}",
            f"{row['bytes'] / whole:.1%}",
            f"{100 * row['accuracy']:.1f}",
            f"{row['seconds']:.1f}",
        )
    Console().print(table)
    write_json(args.json, {"rows": rows})


if __name__ == "__main__":
    main()
