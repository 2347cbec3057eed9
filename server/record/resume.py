"""Resumes a run from its last checkpoint, as a new Flower run."""

import fcntl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, TextIO

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from flwr_distill.protocol.meeting import CONTINUE, Continuation
from flwr_distill.protocol.messages import CONFIG
from flwr_distill.protocol.replies import usable
from flwr_distill.server.page.run_files import flat
from flwr_distill.server.record.checkpoint import (
    Checkpoint,
    CheckpointError,
    checkpoints,
    load_checkpoint,
)
from flwr_distill.server.record.packing import PackingError, pack, renamed
from flwr_distill.server.record.run_ids import LATEST, LOCK, RunIdError, by_start, full_id
from flwr_distill.server.roster import Roster
from flwr_distill.server.settings import RunSettings, default_settings
from flwr_distill.strategies.common.answered import has_own_loop

ENDS_WITHIN = 30.0
"""Seconds that the process of a stopped run may take to end; Flower's takes about five."""
PAUSE = 0.2
"""Seconds between polls of a locked folder."""
MAY_CHANGE_ON_RESUME = {
    "data-root",
    "download",
    "edge",
    "hooks",
    "keep-checkpoints",
    "links",
    "min-nodes",
    "num-rounds",
    "patience-failed",
    "phase-timeout",
    "queue-id",
    "quorum",
    "resume",
    "runs-dir",
    "server-device",
    "simulation.together",
}
"""Settings that a resumed run may change: they affect what is learnt by rounding alone."""


def find_run_to_resume(settings: RunSettings, run_id: int) -> Path:
    """Folder of the run that ``resume`` names, or of a new run.

    Raises CheckpointError if there is no such run, or it has no checkpoint.
    """
    runs = Path(settings.runs_dir)
    if not settings.resume:
        return runs / str(run_id)
    if settings.resume == LATEST:
        started = by_start(runs)
        if not started:
            raise _refusal(settings, f"no run in {runs.resolve()} has a checkpoint")
        if not checkpoints(started[-1]):
            raise _refusal(
                settings,
                f"run {started[-1].name} started last in {runs.resolve()}: it has no checkpoint",
                "name another by its id",
            )
        return started[-1]
    if checkpoints(runs / settings.resume):
        return runs / settings.resume
    ids = sorted(folder.name for folder in runs.glob("*") if checkpoints(folder))
    try:
        return runs / full_id(settings.resume, ids)
    except RunIdError as error:
        raise _refusal(
            settings,
            f"{error.problem} with checkpoints in {runs.resolve()}",
            'name a run by its id or its first digits, or "latest"; flwr-distill runs list shows '
            "them",
        ) from None


def checkpoint_to_resume(settings: RunSettings, folder: Path, data: str = "") -> Checkpoint | None:
    """Load the last checkpoint in a locked folder; None for a new run.

    `data` is the fingerprint of the server's data set, if it has one. Raises CheckpointError if the
    checkpoint is damaged, settings or data differ, or no round is left.
    """
    if not settings.resume:
        return None
    checkpoint = load_checkpoint([*checkpoints(folder).values()][-1])
    new = flat(settings.model_dump(by_alias=True))
    old = flat(default_settings()) | flat(checkpoint.settings)
    changed = [
        f"{key} = {old[key]!r} then, {new.get(key)!r} now"
        for key in sorted(old.keys() - MAY_CHANGE_ON_RESUME)
        if old[key] != new.get(key)
    ]
    if changed:
        raise _refusal(
            settings,
            f"run {folder.name} has other settings: {'; '.join(changed)}",
            "use the same ones, or start a new run without resume",
        )
    if checkpoint.record["data"] != data:
        raise _refusal(
            settings,
            f"dataset = {settings.dataset!r} has changed on the server since run {folder.name} "
            "read it",
            "restore the earlier files, or start a new run",
        )
    # Below an edge, the evaluation of the last round may be left.
    if checkpoint.round >= settings.num_rounds and not settings.edge:
        raise _refusal(
            settings,
            f"run {folder.name} is over: round {checkpoint.round} of {settings.num_rounds}",
            "raise num-rounds to continue",
        )
    log(INFO, "Run %s resumes after round %d", folder.name, checkpoint.round)
    return checkpoint


def _refusal(settings: RunSettings, problem: str, remedy: str = "") -> CheckpointError:
    return CheckpointError(problem, where="resume", value=settings.resume, remedy=remedy)


def way_to_resume(strategy: Strategy, folder: Path) -> str:
    """The setting by which a run can be resumed; empty if its strategy has its own loop."""
    return "" if has_own_loop(type(strategy)) else f'resume = "{folder.name}"'


@contextmanager
def lock_run_folder(folder: Path) -> Iterator[Path]:
    """Create and lock a run's folder; wait a while for a run that was just stopped.

    Raises CheckpointError if another process keeps it locked.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as lock:
        deadline = time.monotonic() + ENDS_WITHIN
        if taken := not _locked(lock):
            log(INFO, "Waiting for the end of run %s, which has locked its folder", folder.name)
        while taken and not _locked(lock):
            if time.monotonic() > deadline:
                raise CheckpointError(
                    "it is still running in another process",
                    where=f"run {folder.name}",
                    remedy="stop that first",
                )
            time.sleep(PAUSE)
        yield folder


def _locked(lock: TextIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def state_of(strategy: Strategy) -> dict[str, Any]:
    """State of a strategy besides the global model.

    For strategies without ``state_dict()``, all attributes that are plain data or arrays, such as
    the moments of Flower's FedAdam.
    """
    if hasattr(strategy, "state_dict"):
        state: dict[str, Any] = strategy.state_dict()
        return state
    attributes = {}
    for name, value in vars(strategy).items():
        try:
            pack(value, {})
        except PackingError:
            continue
        attributes[name] = value
    return {"strategy": type(strategy).__name__, "attributes": attributes}


def load_state(strategy: Strategy, state: Mapping[str, Any]) -> None:
    """Load a state of `state_of`; KeyError, TypeError or ValueError if it does not fit."""
    if hasattr(strategy, "load_state_dict"):
        strategy.load_state_dict(state)
    elif state["strategy"] != type(strategy).__name__:
        raise ValueError(f"this is the state of {state['strategy']}")
    else:
        vars(strategy).update(state["attributes"])


def restore(strategy: Strategy, checkpoint: Checkpoint, roster: Roster) -> None:
    """Load a checkpoint's state into a strategy; nodes may have new ids (see `returned_nodes`).

    Raises CheckpointError if the state is another strategy's or version's, or if the strategy has a
    loop of its own, which would start over.
    """
    name = type(strategy).__name__
    if has_own_loop(type(strategy)):
        raise CheckpointError("it has its own loop, which cannot be resumed", where=name)
    state = renamed(checkpoint.state, ids_of_returned(checkpoint, roster))
    try:
        load_state(strategy, state)
    except (KeyError, TypeError, ValueError) as error:
        problem = f"it cannot resume from the checkpoint of round {checkpoint.round}: {error!r}"
        raise CheckpointError(problem, where=name) from error


def continue_on_nodes(grid: Grid, checkpoint: Checkpoint, roster: Roster, timeout: float) -> None:
    """Have nodes load the state that they stored in the checkpoint's run."""
    returned = ids_of_returned(checkpoint, roster)
    old_ids = {node: old for old, node in returned.items()}
    messages = []
    for node in roster.nodes:
        if node not in old_ids:
            log(WARNING, "Node %d is new to the run", node)
            continue
        request = Continuation(
            run_id=str(checkpoint.run_id), node_id=str(old_ids[node]), round=checkpoint.round
        )
        record = ConfigRecord(request.model_dump(by_alias=True))
        messages.append(Message(RecordDict({CONFIG: record}), node, CONTINUE))
    back = {checkpoint.nodes[old] for old in returned}
    for identity in sorted(set(checkpoint.nodes.values()) - back):
        log(WARNING, "%s is not back", _display_name(identity))
    usable(grid.send_and_receive(messages, timeout=timeout))


def ids_of_returned(checkpoint: Checkpoint, roster: Roster) -> dict[int, int]:
    """Ids of nodes that are back, by those that they had when the checkpoint was written."""
    return returned_nodes(checkpoint.nodes, checkpoint.keys, roster.identities, roster.resumed_keys)


def returned_nodes(
    places: Mapping[int, str],
    keys: Mapping[int, str],
    claims: Mapping[int, str],
    shown: Mapping[int, str],
) -> dict[int, int]:
    """New id of each node that is back, by its old one; a claim alone gets no other node's place.

    A node must show what it showed when the run met it: a signature of the same certificate's key,
    or the same secret of a state directory. A node that has lost both is new to the run. `places`
    are identities of the checkpoint's nodes, such as partitions, in the order of meeting. Several
    nodes may have had the same: each is known by what it showed, or by its id. Of those that none
    of this tells apart the last counts, as of a node that came back. `keys` are fingerprints of
    what these nodes had shown. `claims` and `shown` are the same of the nodes that are connected
    now.
    """
    returned = {
        old: old
        for old, name in places.items()
        if claims.get(old) == name and keys.get(old) == shown.get(old)
    }
    last = {(name, keys.get(old)): old for old, name in places.items()}
    claimants = {
        (name, shown.get(node)): node
        for node, name in claims.items()
        if node not in returned and places.get(node, name) == name
    }
    names = set(places.values())
    for (name, key), node in claimants.items():
        old = last.get((name, key))
        if old is None and name in names:
            text = "Node %d claims the place of %s, but not its key or secret: it is new"
            log(WARNING, text, node, _display_name(name))
        elif old is not None and old not in returned:
            returned[old] = node
    return returned


def _display_name(identity: str) -> str:
    return f"node-{identity}" if identity.isdecimal() else identity
