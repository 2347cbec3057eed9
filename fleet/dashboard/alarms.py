"""What an operator should see first, causes before their consequences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from flwr_distill.base.text import counted, listed
from flwr_distill.fleet.dashboard.runs import Run
from flwr_distill.fleet.dashboard.watch import Snapshot

DAY = 86_400.0
MAX_ALARMS = 20
"""Of a kind."""


@dataclass(frozen=True)
class Alarm:
    """Something that is wrong, and since when, in seconds since 1970; `link` leads to more."""

    text: str
    since: float = 0.0
    link: str = ""


def alarms(snapshot: Snapshot) -> list[Alarm]:
    """What is wrong now, or has failed within a day."""
    kinds = (
        _superlink(snapshot),
        _stalls(snapshot),
        _failed_nodes(snapshot),
        _nodes_away(snapshot),
        _failed_runs(snapshot),
        _queue(snapshot),
        _checks(snapshot),
    )
    return [alarm for kind in kinds for alarm in islice(kind, MAX_ALARMS)]


def _superlink(snapshot: Snapshot) -> Iterator[Alarm]:
    if not snapshot.away:
        return
    nodes = sum(node.status == "cut off" for node in snapshot.nodes)
    runs = [run.run_id[:6] for run in snapshot.runs if run.state == "unfinished" and run.why]
    text = f"The SuperLink does not answer: {snapshot.away}"
    if nodes:
        text += f". Nodes that are cut off: {nodes}"
    if runs:
        text += f". Runs that are interrupted: {listed(runs)}"
    yield Alarm(text, snapshot.away_since, "#health")


def _stalls(snapshot: Snapshot) -> Iterator[Alarm]:
    for run in snapshot.live:
        if run.phase is None or not run.stalls:
            continue
        who = listed(run.phase.awaited) if run.phase.awaited else "nodes"
        text = f"Run {run.run_id[:6]} waits for {who} ({run.phase.title}: {run.phase.missing} of "
        text += f"{run.phase.asked} missing)"
        if run.pace is not None:
            text += f"; its rounds took {run.pace:.1f} s"
        yield Alarm(text, run.phase.since, f"/runs/{run.run_id}")


def _failed_nodes(snapshot: Snapshot) -> Iterator[Alarm]:
    """Nodes that failed in the present or last round of a live run."""
    for run in snapshot.live:
        for problem in run.problems:
            if problem.node and problem.round >= run.round:
                kind = "failed" if problem.kind == "failed" else "was rejected"
                text = f"{problem.node} {kind} in round {problem.round} of run {run.run_id[:6]}, "
                yield Alarm(text + problem.text, problem.first, f"/runs/{run.run_id}")


def _nodes_away(snapshot: Snapshot) -> Iterator[Alarm]:
    away = [n for n in snapshot.nodes if not n.is_online and n.status != "cut off"]
    if snapshot.away:  # else each node's loss of the SuperLink would stand beside its cause
        away = [node for node in away if node.status == "not running"]
    for node in away[: MAX_ALARMS - 1]:
        last = f": {node.error}" if node.error else ""
        yield Alarm(f"{node.name} is {node.status}{last}", node.since, "#nodes")
    if (more := len(away) - MAX_ALARMS + 1) > 0:
        yield Alarm(f"{counted(more, 'more node')} not online", link="#nodes")


def _failed_runs(snapshot: Snapshot) -> Iterator[Alarm]:
    for run in snapshot.runs:
        if run.state == "failed" and snapshot.time - _end(run) < DAY:
            why = f": {run.why}" if run.why else ""
            yield Alarm(f"Run {run.run_id[:6]} failed{why}", _end(run), f"/runs/{run.run_id}")


def _queue(snapshot: Snapshot) -> Iterator[Alarm]:
    if snapshot.queue_problem:
        yield Alarm(f"Queue: {snapshot.queue_problem}", link="#queue")


def _checks(snapshot: Snapshot) -> Iterator[Alarm]:
    for check in snapshot.checks:
        if not check.fine and check.found != snapshot.away:
            yield Alarm(f"{check.what}: {check.found}", link="#health")


def _end(run: Run) -> float:
    return run.ended or run.started
