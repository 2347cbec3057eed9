"""`flwr-distill logs`: a run's lines on its server and on the nodes of this machine."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from flwr_distill.base import json_lines
from flwr_distill.base.json_lines import Line
from flwr_distill.cli.connection import SuperLinkOptions, Timeout, with_superlink
from flwr_distill.cli.errors import exit_on, fail
from flwr_distill.cli.run_log import STYLES
from flwr_distill.fleet.submission import follow
from flwr_distill.flower.control import SuperLinkError
from flwr_distill.node.log_lines import indented, without_level
from flwr_distill.server.record.run_ids import RunIdError, full_id

MAX_LINE = 1 << 17
"""Bytes of a line of a node's log; longer ones are skipped, as no process of ours writes them."""
MAX_FIELD = 40
_PAUSE = 0.5
_WAIT = 1.0
"""Seconds that a line waits for earlier ones of other processes."""


@with_superlink
def logs(
    *,
    run: Annotated[str, typer.Argument(help="Id of a run or its first digits, or latest.")],
    node: Annotated[
        str, typer.Argument(help="Name of a node, as in ward-3.", show_default="all")
    ] = "",
    options: SuperLinkOptions,
    timeout: Timeout = 10.0,
) -> None:
    """Follow the log of a run to its end: lines of the server, and of a local federation's nodes.

    One id joins a message's lines on server and node; its first digits stand before the text. The
    lines of nodes and messages need --log-format json, where the processes start. Nodes elsewhere
    write to logs of their own, which this command does not see.
    """
    link = options.find("logs")
    with exit_on(SuperLinkError, command="logs"):
        with link.open(timeout) as control:
            known = [str(run.run_id) for run in control.runs()]
        try:
            run_id = full_id(run, known)
        except RunIdError as error:
            fail(error, "logs")
        folders = map(Path, link.federation.node_dirs) if link.federation else ()
        shown = _Shown(Console(), run_id, node, [folder / "node.log" for folder in folders])
        try:
            with shown:
                follow(int(run_id), lambda: link.open(timeout), shown.add_of_server)
        except KeyboardInterrupt:
            raise shown.error or typer.Exit(130) from None
    if not shown.count:
        remedy = "start server and nodes with --log-format json; or it has another name"
        fail(f"no line is about {node or 'it'}", "logs", where=f"run {run_id}", remedy=remedy)


class _Shown:
    """Prints lines by their times, each a moment after it came; those of nodes are in files."""

    def __init__(self, console: Console, run: str, node: str, files: list[Path]) -> None:
        self.count = 0
        self.error: BaseException | None = None
        """Why nothing more is printed."""
        self._console = console
        self._run = run
        self._node = node
        self._files = dict.fromkeys(files, 0)
        self._in_long_line: set[Path] = set()
        self._latest = ""
        self._waiting: list[tuple[float, Line]] = []
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._print, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()

    def add_of_server(self, text: str) -> None:
        """Take a line of the run's log on the server."""
        line = json_lines.read(text)
        if line is None or line.run != self._run:
            level, text = without_level(text)
            line = Line(text, level or "INFO", time=self._latest)
        line = replace(line, process="serverapp")
        self._latest = line.time
        self._add(line)

    def _add(self, line: Line) -> None:
        if line.text.strip() and self._node in ("", line.node):
            with self._lock:
                self._waiting.append((time.monotonic() + _WAIT, line))

    def _print(self) -> None:
        try:
            self._print_until_end()
        except BaseException as error:  # a reader that is gone is SystemExit
            self.error = error
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def _print_until_end(self) -> None:
        is_over = False
        while not is_over:
            is_over = self._end.wait(_PAUSE)
            for line in self._new_lines_of_nodes():
                self._add(line)
            now = time.monotonic()
            with self._lock:
                due = [line for at, line in self._waiting if is_over or at <= now]
                self._waiting = [] if is_over else [e for e in self._waiting if e[0] > now]
            for line in sorted(due, key=lambda line: line.time):
                self._print_line(line)

    def _new_lines_of_nodes(self) -> Iterator[Line]:
        for path in self._files:
            with suppress(OSError):  # it may vanish, or be another program's for a moment
                yield from self._new_lines_of(path)

    def _new_lines_of(self, path: Path) -> Iterator[Line]:
        about = self._run.encode()
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < self._files[path]:
                self._files[path] = 0  # it was cut or replaced
            file.seek(self._files[path])
            while self._files[path] < size:
                raw = file.readline(MAX_LINE)
                is_whole = raw.endswith(b"\n")
                if not is_whole and len(raw) < MAX_LINE:
                    break  # it is being written
                self._files[path] += len(raw)
                is_rest = path in self._in_long_line
                (self._in_long_line.discard if is_whole else self._in_long_line.add)(path)
                if is_whole and not is_rest and about in raw:
                    line = json_lines.read(raw.decode("utf-8", "replace"))
                    if line is not None and line.run == self._run:
                        yield line

    def _print_line(self, line: Line) -> None:
        self.count += 1
        place = "server" if line.process == "serverapp" else f"{line.node} {line.process}"
        words = [line.time[11:23], place, line.message_id[:8], line.level, line.text]
        *fields, text = (indented(word) for word in words)
        start = "  ".join(field[:MAX_FIELD] for field in fields if field)
        self._console.print(
            Text(f"{start}  {text[: json_lines.MAX_TEXT]}", STYLES.get(line.level, "")),
            soft_wrap=True,
        )
