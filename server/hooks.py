"""Hooks see a run's events in order: journal, recorder, checkpoints, report, and plug-ins'."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from logging import WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord
from flwr.common import log

from flwr_distill.task.plugin import located

if TYPE_CHECKING:
    from flwr_distill.server.record.checkpoint import Checkpoint


@dataclass(frozen=True)
class RoundRow:
    """State of a run at the end of a round; a line of ``metrics.jsonl``.

    Accuracies are in [0, 1]. Bytes and seconds count from the start of the run.
    """

    round: int
    accuracy: float | None  # None if the server has no test samples, or no global model
    loss: float | None  # mean cross-entropy in nats; None likewise
    server_bytes: int  # both ways
    link_bytes: int  # between nodes
    seconds: float
    class_accuracy: list[float | None] | None = None  # None for a class without samples
    node_accuracy: float | None = None  # unweighted mean over nodes; None if nodes did not evaluate
    balanced_accuracy: float | None = None  # this and what follows: see `task.scores`
    macro_f1: float | None = None
    auroc: float | None = None
    ece: float | None = None
    intervals: dict[str, list[float]] | None = None  # 95 %, of these and accuracy, by name
    confusion: list[list[int]] | None = None  # by true and predicted class; None for many classes
    node_scores: dict[str, Any] | None = None
    """The same of all nodes together that sent counts of held-out samples, and how many ``nodes``
    and ``samples`` these are, as far as others' claims let them count; None without any."""
    set_aside: int = 0  # replies, plus parcels and models that heads and leaders rejected


@dataclass(frozen=True)
class RunStart:
    """A run that starts or is resumed."""

    run_id: int  # Flower's; a resumed run has a new one
    folder: Path  # of its results
    settings: Mapping[str, Any]  # as in ``settings.json``
    nodes: Mapping[int, str]  # names of the nodes by Flower's id
    rows: Sequence[RoundRow]  # rounds that were over before; empty unless the run is resumed


@dataclass(frozen=True)
class PhaseEnd:
    """A phase that is over."""

    round: int  # its round; 0 is before the first
    name: str  # its message type, such as ``train``
    seconds: float
    asked: int  # nodes
    nodes: Mapping[str, Mapping[str, float]]
    """Metrics of each node that replied without an error, by Flower's id. Replies are not yet
    compared with each other."""


@dataclass(frozen=True)
class RoundEnd:
    """A round that is over; round 0 is the initial model."""

    row: RoundRow  # its numbers
    model: ArrayRecord | None
    """The model, without what is frozen in it; None if nodes keep models of their own."""
    topology: Mapping[str, Any] | None
    """The strategy's clusters, with nodes by name; None if it has none."""
    failure: str = ""  # why nothing was learnt in it; empty if something was


@dataclass(frozen=True)
class RunEnd:
    """A run that has finished."""

    model: ArrayRecord | None
    """The final model, whole; None if nodes keep models of their own, or the run trained none."""
    formula_bytes: Mapping[str, float]  # cost of the run by the papers' formulas
    artifacts: Mapping[str, bytes]  # the strategy's own files, by name
    warnings: Sequence[str]  # what may be wrong with the federation
    partition: Mapping[str, list[int]] | None
    """Samples of each class by node name, where the settings alone say them."""


class Hook:
    """Sees a run's events; override what you need.

    Methods are called in the run's own thread, which waits for them. Do not change their arguments,
    which are shared. If another package's hook raises an exception, the log names the hook, it gets
    no further events, and the run continues. An exception in our own hooks ends the run.
    """

    def on_run_start(self, run: RunStart) -> None:
        """A run starts: its nodes are known, and nothing has been trained."""

    def on_phase(self, phase: PhaseEnd) -> None:
        """A phase ends: messages of one type, with the replies that came in time."""

    def on_round_end(self, end: RoundEnd) -> None:
        """A round ends, after evaluation; new nodes are met after it."""

    def on_checkpoint(self, checkpoint: "Checkpoint") -> None:
        """A checkpoint is stored: the state after a round, with the nodes that were met since."""

    def on_failure(self, error: Exception, model: ArrayRecord | None) -> None:
        """A run fails after its start, and the error then ends it.

        `model` is the whole model so far; None if nothing was learnt, or nodes keep their own.
        """

    def on_run_end(self, end: RunEnd) -> None:
        """A run finishes; all its files are written."""


class Hooks(Hook):
    """Hooks of a run, called in order: ours first, then others' by name.

    Others' hooks get no event before the run's start. Python's random numbers, by which Flower
    samples nodes, are the same with them as without.
    """

    def __init__(self, *own: Hook, others: Mapping[str, Hook] | None = None) -> None:
        self._own = [*own]
        self._others = dict(others or {})
        self._started = False

    def add(self, *own: Hook) -> None:
        """Add hooks of ours after those that are there."""
        self._own += own

    def on_run_start(self, run: RunStart) -> None:
        """Others' hooks get this and later events."""
        self._call_own("on_run_start", run)
        self._started = True
        self._call_others("on_run_start", run)

    def on_phase(self, phase: PhaseEnd) -> None:
        """Pass on."""
        self._call("on_phase", phase)

    def on_round_end(self, end: RoundEnd) -> None:
        """Pass on."""
        self._call("on_round_end", end)

    def on_checkpoint(self, checkpoint: "Checkpoint") -> None:
        """Pass on."""
        self._call("on_checkpoint", checkpoint)

    def on_failure(self, error: Exception, model: ArrayRecord | None) -> None:
        """Others' hooks get it even if the report cannot be written."""
        try:
            self._call_own("on_failure", error, model)
        finally:
            self._call_others("on_failure", error, model)

    def on_run_end(self, end: RunEnd) -> None:
        """Pass on."""
        self._call("on_run_end", end)

    def _call(self, method: str, *args: Any) -> None:
        self._call_own(method, *args)
        self._call_others(method, *args)

    def _call_own(self, method: str, *args: Any) -> None:
        for hook in self._own:
            getattr(hook, method)(*args)

    def _call_others(self, method: str, *args: Any) -> None:
        if not self._started:
            return
        state = random.getstate()
        for name, hook in [*self._others.items()]:
            try:
                getattr(hook, method)(*args)
            except Exception as error:  # of another package
                del self._others[name]
                text = "Hook %s is switched off: its %s failed: %s"
                log(WARNING, text, name, method, located(error, type(hook).__module__))
        random.setstate(state)
