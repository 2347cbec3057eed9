"""Going on with a run from its last checkpoint, in a new run of Flower's."""

import fcntl
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from protocol.meeting import CONTINUE, Continuation
from protocol.messages import CONFIG
from protocol.replies import usable
from server.page.run_files import flat
from server.record.checkpoint import Checkpoint, CheckpointError, checkpoints, load_checkpoint
from server.record.packing import PackingError, pack, renamed
from server.roster import Roster
from server.settings import RunSettings, default_settings

MAY_CHANGE_ON_RESUME = {
    "data-root",
    "download",
    "keep-checkpoints",
    "links",
    "min-nodes",
    "num-rounds",
    "phase-timeout",
    "quorum",
    "resume",
    "runs-dir",
}
"""Settings that a resumed run may have otherwise: how long and where, not what is learnt."""


def find_run_to_resume(settings: RunSettings, run_id: int) -> Path:
    """Find the folder of the run that ``resume`` names; of a new run, the folder to be.

    Raises
    ------
    CheckpointError
        If there is no checkpoint.
    """
    if not settings.resume:
        return Path(settings.runs_dir) / str(run_id)
    runs = Path(settings.runs_dir)
    if settings.resume == "latest":
        files = [file for folder in runs.glob("*") for file in checkpoints(folder).values()]
        if not files:
            raise CheckpointError(f'resume = "latest": no run in {runs.resolve()} has a checkpoint')
        return max(files, key=lambda file: file.stat().st_mtime).parent.parent
    folder = runs / settings.resume
    if not checkpoints(folder):
        raise CheckpointError(
            f"resume = {settings.resume!r}: no checkpoints in {folder.resolve()} (name a run by "
            'its id, or "latest"; flwr-distill runs list shows them)'
        )
    return folder


def checkpoint_to_resume(settings: RunSettings, folder: Path) -> Checkpoint | None:
    """Load the last checkpoint of a run, and check that these are its settings.

    Parameters
    ----------
    settings : RunSettings
        Of the run that begins.
    folder : Path
        The run's, locked.

    Returns
    -------
    Checkpoint or None
        None if the run is a new one.

    Raises
    ------
    CheckpointError
        If the checkpoint is damaged, the settings differ, or no round is left.
    """
    if not settings.resume:
        return None
    checkpoint = load_checkpoint([*checkpoints(folder).values()][-1])
    now = flat(settings.model_dump(by_alias=True))
    then = flat(default_settings()) | flat(checkpoint.settings)
    changed = [
        f"{key} = {then[key]!r} then, {now.get(key)!r} now"
        for key in sorted(then.keys() - MAY_CHANGE_ON_RESUME)
        if then[key] != now.get(key)
    ]
    if changed:
        raise CheckpointError(
            f"resume = {settings.resume!r}: run {folder.name} has other settings: "
            f"{'; '.join(changed)} (give those of then, or begin a new run without resume)"
        )
    if checkpoint.round >= settings.num_rounds:
        raise CheckpointError(
            f"resume = {settings.resume!r}: run {folder.name} is over: {checkpoint.round} rounds "
            f"of {settings.num_rounds} (raise num-rounds to go on)"
        )
    log(INFO, "Run %s goes on after round %d", folder.name, checkpoint.round)
    return checkpoint


@contextmanager
def lock_run_folder(folder: Path) -> Iterator[Path]:
    """Keep other processes from writing into the folder of a run; make it if it is absent.

    Raises
    ------
    CheckpointError
        If another one does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CheckpointError(
                f"run {folder.name} still goes on in another process (stop that first)"
            ) from None
        yield folder


def state_of(strategy: Strategy) -> dict[str, Any]:
    """What a strategy needs to go on, besides the global model.

    Strategies with ``state_dict()`` say it themselves. Of any other it is those of its attributes
    that are plain data or arrays, as the moments of Flower's FedAdam are.
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


def restore(strategy: Strategy, checkpoint: Checkpoint, roster: Roster) -> None:
    """Give a strategy the state that a checkpoint holds.

    Nodes that are back under another id, after they or the SuperLink began anew, are known by their
    names.

    Parameters
    ----------
    strategy : Strategy
        Of the same settings.
    checkpoint : Checkpoint
        Whose state it gets.
    roster : Roster
        The nodes as they are now.

    Raises
    ------
    CheckpointError
        If the state is of another strategy, or of another version of it.
    """
    now = {name: node for node, name in roster.names.items()}
    before = {name: node for node, name in checkpoint.nodes.items()}  # the last id of each
    ids = {node: now[name] for name, node in before.items() if name in now}
    state = renamed(checkpoint.state, ids)
    try:
        if hasattr(strategy, "load_state_dict"):
            strategy.load_state_dict(state)
        elif state["strategy"] != type(strategy).__name__:
            raise ValueError(f"it is the state of {state['strategy']}")
        else:
            vars(strategy).update(state["attributes"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{type(strategy).__name__} cannot go on from the checkpoint of round "
            f"{checkpoint.round}: {error!r}"
        ) from error


def continue_on_nodes(grid: Grid, checkpoint: Checkpoint, roster: Roster, timeout: float) -> None:
    """Have nodes take over what they kept in the run that wrote the checkpoint.

    Parameters
    ----------
    grid : Grid
        Any Flower grid.
    checkpoint : Checkpoint
        Where the run goes on.
    roster : Roster
        The nodes as they are now.
    timeout : float
        Seconds to wait for them.
    """
    before = {name: node for node, name in checkpoint.nodes.items()}
    messages = []
    for node, name in roster.names.items():
        if name not in before:
            log(WARNING, "Node %d is new to the run", node)
            continue
        request = Continuation(
            run_id=str(checkpoint.run_id), node_id=str(before[name]), round=checkpoint.round
        )
        record = ConfigRecord(request.model_dump(by_alias=True))
        messages.append(Message(RecordDict({CONFIG: record}), node, CONTINUE))
    for name in before.keys() - set(roster.names.values()):
        log(WARNING, "Node %s is not back", name)
    usable(grid.send_and_receive(messages, timeout=timeout))


class OffsetRounds(Strategy):
    """A strategy whose rounds are counted from later on, under Flower's own loop.

    Parameters
    ----------
    strategy : Strategy
        What does the work.
    done : int
        Rounds that are over; round 1 of Flower's loop is the one after these.

    Raises
    ------
    CheckpointError
        If the strategy has a loop of its own.
    """

    def __init__(self, strategy: Strategy, done: int) -> None:
        if type(strategy).start is not Strategy.start:
            raise CheckpointError(
                f"{type(strategy).__name__} has a loop of its own, which cannot be resumed"
            )
        self._strategy = strategy
        self._done = done

    def summary(self) -> None:
        """Log summary configuration of the strategy."""
        log(INFO, "\t├──> %d rounds are over", self._done)
        self._strategy.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Configure the next round of training."""
        return self._strategy.configure_train(server_round + self._done, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate what was trained."""
        return self._strategy.aggregate_train(server_round + self._done, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Configure the next round of evaluation."""
        return self._strategy.configure_evaluate(server_round + self._done, arrays, config, grid)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Aggregate what was evaluated."""
        return self._strategy.aggregate_evaluate(server_round + self._done, replies)


def offset_evaluate(
    done: int, evaluate: Callable[[int, ArrayRecord], MetricRecord | None]
) -> Callable[[int, ArrayRecord], MetricRecord | None]:
    """Wrap an ``evaluate_fn`` like :class:`OffsetRounds`; its first model was evaluated before."""

    def evaluate_later(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        return evaluate(server_round + done, arrays) if server_round else None

    return evaluate_later
