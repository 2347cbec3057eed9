"""The run below an edge: it answers messages from above, in place of its own rounds."""

import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as OutOfTimeError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp.strategy import Strategy

from flwr_distill.protocol.arrays import as_arrays, as_record, check_arrays
from flwr_distill.protocol.edge import ASK, END, GREET, from_bytes, to_bytes
from flwr_distill.protocol.edge_calls import EdgeError, listen
from flwr_distill.protocol.meeting import DESCRIBE, Requirement, one_line
from flwr_distill.protocol.messages import (
    ARRAYS,
    CONFIG,
    METRICS,
    NUM_EXAMPLES,
    SERVER_ROUND,
    TRAIN_ACCURACY,
    TRAIN_LOSS,
)
from flwr_distill.protocol.method import Method
from flwr_distill.protocol.replies import NothingUsableError
from flwr_distill.server.grid.pipeline import QuorumError
from flwr_distill.server.grid.screening import typed
from flwr_distill.server.record.recorder import write_rows
from flwr_distill.server.roster import meet_nodes
from flwr_distill.server.rounds import Rounds
from flwr_distill.server.settings import RunSettings
from flwr_distill.strategies.common.answered import has_own_loop
from flwr_distill.strategies.common.waiting import TooFewNodesError
from flwr_distill.task.backbones import fingerprint
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.labels import LabelError

THREADS = 8
"""Concurrent calls: an edge's node makes one after the other."""
MAX_WAITING = 4
FAREWELL = 5.0
"""Seconds for which a run that has failed still reports why."""
PATIENCE = 3
"""Phases here that a run waits for the next message: one above takes longer than one here."""
REFUSED = (EdgeError, LabelError, TooFewNodesError, NothingUsableError, QuorumError)
"""Errors that end an answer, and not the run."""


@dataclass
class Command:
    """A message from above."""

    message: Message
    due: float  # monotonic seconds
    answer: Future[RecordDict] = field(default_factory=Future)


class Commands:
    """A queue of messages from above."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        """Whether the edge wants the run to end."""
        self._waiting: queue.Queue[Command | None] = queue.Queue(MAX_WAITING)
        self._closed = ""
        self._reported = threading.Event()
        self._unanswered: set[Future[RecordDict]] = set()
        self._lock = threading.Lock()

    def next(self, seconds: float) -> Command | None:
        """The next one whose caller still waits; None after so long, or at the end."""
        end = time.monotonic() + seconds
        while not self.ended.is_set():
            try:
                command = self._waiting.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                return None
            if command and time.monotonic() < command.due:
                return command
        return None

    def ask(self, request: bytes, seconds: float) -> bytes:
        """Have the run answer a message; called by another thread."""
        command = Command(from_bytes(request), time.monotonic() + seconds)
        with self._lock:
            if self._closed:
                self._reported.set()
                raise EdgeError(self._closed)
            self._unanswered.add(command.answer)
        try:
            self._waiting.put_nowait(command)
            content = command.answer.result(seconds)
        except queue.Full:
            raise EdgeError("the run below has too many messages to answer") from None
        except OutOfTimeError:
            raise EdgeError(f"the run below did not answer within {seconds:.0f} s") from None
        except EdgeError:
            self._reported.set()
            raise
        finally:
            with self._lock:
                self._unanswered.discard(command.answer)
        return to_bytes(Message(content, 0, command.message.metadata.message_type))

    def end(self, request: bytes, seconds: float) -> bytes:
        """Have the run end once it has answered; called by another thread."""
        self.ended.set()
        with suppress(queue.Full):
            self._waiting.put_nowait(None)  # wakes `next`
        return b""

    def close(self, reason: str, *, linger: float = 0.0) -> None:
        """Refuse waiting and new messages; linger up to so many seconds until one caller knows."""
        with self._lock:
            self._closed = reason
            self._reported.clear()
            for answer in self._unanswered:
                if not answer.done():
                    answer.set_exception(EdgeError(reason))
        self._reported.wait(linger)


@contextmanager
def commands_from_above(socket: str) -> Iterator[Commands | None]:
    """Take an edge's commands at a socket, in the block; None without a socket."""
    if not socket:
        yield None
        return
    commands = Commands()
    answers = {ASK: commands.ask, END: commands.end, GREET: lambda request, seconds: b""}
    server = listen(Path(socket), answers, threads=THREADS)
    try:
        yield commands
        commands.close("the run below has ended")
    except Exception as error:
        reason = one_line(f"the run below has failed: {error}")
        commands.close(reason, linger=FAREWELL)
        raise
    finally:
        server.stop(grace=1.0).wait()


def check_below(settings: RunSettings, strategy: type[Strategy], method: Method | None) -> None:
    """Raise SettingsError if a strategy cannot serve below an edge: it makes its own models."""
    if not settings.edge:
        return
    reason = ""
    if has_own_loop(strategy):
        reason = "it has its own loop"
    elif method and method.outcome != "trained":
        is_personal = method.outcome == "personal"
        reason = "nodes keep models of their own" if is_personal else "it does not train on"
    elif settings.start:
        reason = "the first model comes from above (set start to nothing)"
    if reason:
        raise SettingsError(
            f"strategy = {settings.strategy!r} cannot serve below an edge: {reason}",
            where="edge",
            remedy="give the edge another with --strategy, such as fedavg or fedhead",
        )


@dataclass
class EdgeRounds(Rounds):
    """Rounds on request: their models come from above and go back there.

    A failed round, evaluation or description is refused with the reason, and the run continues. It
    ends after its last round, when the edge ends it, or without further requests.
    """

    commands: Commands = field(default_factory=Commands)  # from above

    def learn(self, done: int | None) -> ArrayRecord:
        """The model of the last requested round."""
        if done is None:
            self.end_round(0, self.model)
        last = done or 0
        while command := self.commands.next(PATIENCE * self.settings.phase_timeout):
            self.grid.transport.due = command.due
            try:
                content = self._answer(command.message)
            except REFUSED as error:
                log(WARNING, "Refused above: %s", error)
                reason = error if isinstance(error, EdgeError) else EdgeError(one_line(error))
                command.answer.set_exception(reason)
            else:
                command.answer.set_result(content)
            last = self.history.rows[-1].round
            if self._is_over(last, command.message):
                return self.model
        ended = self.commands.ended.is_set()
        why = "the edge ended it" if ended else "no request came from above"
        self.roster.warnings.append(
            f"Ended after round {last} of {self.settings.num_rounds}: {why}"
        )
        log(INFO, "%s", self.roster.warnings[-1])
        return self.model

    def _is_over(self, last: int, message: Message) -> bool:
        """Whether the run above has no further message for the edge."""
        if last < self.settings.num_rounds:
            return False
        evaluates = self.settings.fraction_evaluate > 0
        return not evaluates or message.metadata.message_type == MessageType.EVALUATE

    def _answer(self, message: Message) -> RecordDict:
        answers = {
            DESCRIBE: self._describe,
            MessageType.TRAIN: self._train,
            MessageType.EVALUATE: self._evaluate,
        }
        self._wait_for_nodes()
        return answers[message.metadata.message_type](message)

    def _wait_for_nodes(self) -> None:
        """Wait for ``min-nodes`` nodes, for half of the time that is left."""
        if len(self._connected()) < self.settings.min_nodes:
            seconds = max(1.0, (self.grid.transport.due - time.monotonic()) / 2)
            meet_nodes(self.grid, self.roster, self.settings.min_nodes, seconds)
            self._follow_roster()

    def _connected(self) -> list[int]:
        return [node for node in self.grid.get_node_ids() if node in self.roster.nodes]

    def _describe(self, message: Message) -> RecordDict:
        """The nodes' samples, as they count, and their classes if all name theirs."""
        record = message.content.config_records.get(CONFIG)
        requirement = Requirement() if record is None else Requirement.checked(record, "message")
        if requirement.frozen not in ("", fingerprint(self.task.model)):
            raise EdgeError(
                f"model = {self.settings.model!r} has another frozen network on this edge than on "
                "the server (install the same version of its package, or copy its file)"
            )
        requirement.check_labels(self.task.spec.labels)
        config: dict[str, Any] = {}
        classes = [self.roster.nodes[node].classes for node in self._connected()]
        if None not in classes:
            config["classes"] = sorted({label for labels in classes for label in labels or ()})
        if not self.task.class_names and self.roster.directory.class_names:
            config["class-names"] = list(self.roster.directory.class_names)
        metrics = MetricRecord({NUM_EXAMPLES: self._samples()})
        return RecordDict({METRICS: metrics, CONFIG: ConfigRecord(config)})

    def _samples(self) -> int:
        """Samples of the nodes that are connected, as they count in this run."""
        return sum(self.roster.directory.samples(self._connected()).values())

    def _train(self, message: Message) -> RecordDict:
        request = message.content.config_records.get(CONFIG, ConfigRecord())
        server_round, self.model = _round_of(request), self._received(message)
        self._begin(server_round)
        config = self.train_config()
        config.update({key: value for key, value in request.items() if key in config})
        messages = self.strategy.configure_train(server_round, self.model, config, self.grid)
        replies = self.grid.send_and_receive(messages, timeout=self.settings.phase_timeout)
        spent = _spent(replies)
        arrays, metrics = self.aggregate(server_round, replies)
        means = {
            key: metrics[key] for key in (TRAIN_LOSS, TRAIN_ACCURACY) if metrics and key in metrics
        }
        samples = self._samples()
        self.end_round(server_round, self.model if arrays is None else arrays)
        if self._failures:
            raise EdgeError(f"round {server_round} failed: {self._failures[-1]}")
        model = typed(as_arrays(self.model), as_arrays(self.task.start))
        numbers = MetricRecord({NUM_EXAMPLES: samples, **means, **spent})
        return RecordDict({ARRAYS: as_record(model), METRICS: numbers})

    def _evaluate(self, message: Message) -> RecordDict:
        request = message.content.config_records.get(CONFIG, ConfigRecord())
        server_round, model = _round_of(request), self._received(message)
        self._begin(server_round)
        messages = list(self.strategy.configure_evaluate(server_round, model, request, self.grid))
        if not messages:
            raise EdgeError(
                "no node evaluates below (start the edge with -c fraction-evaluate=1.0)"
            )
        replies = self.grid.send_and_receive(messages, timeout=self.settings.phase_timeout)
        answered = [reply.content for reply in replies if reply.has_content()]
        metrics = self.strategy.aggregate_evaluate(server_round, replies)
        if self.history.add_evaluation(server_round):
            write_rows(self.folder, self.history)
        self._begin(server_round + 1)
        if not metrics:
            raise EdgeError(f"no node evaluated in round {server_round}")
        counts: list[Any] = [c.metric_records[METRICS][NUM_EXAMPLES] for c in answered]
        return RecordDict({METRICS: MetricRecord({**metrics, NUM_EXAMPLES: sum(counts)})})

    def _begin(self, server_round: int) -> None:
        self.grid.begin_round(server_round)
        self.journal.round = server_round

    def _received(self, message: Message) -> ArrayRecord:
        (record,) = message.content.array_records.values()
        start = as_arrays(self.task.start)
        try:
            return as_record(check_arrays(typed(as_arrays(record), start), start))
        except ValueError as error:
            raise EdgeError(f"the model from above is not this run's: {error}") from error


def _round_of(config: ConfigRecord) -> int:
    number = config.get(SERVER_ROUND)
    if not isinstance(number, int) or number < 1:
        raise EdgeError(f"the message is of no round: {SERVER_ROUND} is {number!r}")
    return number


def _spent(replies: list[Message]) -> dict[str, float]:
    """The largest epsilon of a node, and its delta; empty without any."""
    spent: list[tuple[Any, Any]] = [
        (epsilon, metrics["dp-delta"])
        for reply in replies
        if reply.has_content()
        for metrics in reply.content.metric_records.values()
        if isinstance(epsilon := metrics.get("dp-epsilon"), int | float)
    ]
    return dict(zip(("dp-epsilon", "dp-delta"), max(spent), strict=True)) if spent else {}
