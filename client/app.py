"""The ClientApp: Flower's train and evaluate, the first meeting, and all methods' handlers."""

import json
from collections.abc import Callable
from dataclasses import replace
from logging import INFO, WARNING
from pathlib import Path

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import adaptiveclipping_mod
from flwr.common import log

from flwr_distill.base.text import counted
from flwr_distill.client.edge import pass_down
from flwr_distill.client.features import as_seen
from flwr_distill.client.local_round import LocalRound, build_model, received_arrays
from flwr_distill.client.missing import missing_for
from flwr_distill.client.secure_sums import summed
from flwr_distill.client.session import (
    RunSource,
    Session,
    held_out,
    keep_scale,
    source_of,
    store_of,
)
from flwr_distill.client.simulation import trained_together, trains_together
from flwr_distill.links import introduce
from flwr_distill.protocol.arguments import read_arguments
from flwr_distill.protocol.counts import COUNTS, REASONS, counts_record, no_counts
from flwr_distill.protocol.meeting import (
    COLUMNS,
    Continuation,
    Requirement,
    identity,
    place_secrets,
    record_of_columns,
    record_of_sums,
)
from flwr_distill.protocol.messages import (
    ARRAYS,
    CLIPPING_NORM,
    CONFIG,
    COUNTS_EPSILON,
    EDGE,
    FINGERPRINT,
    INTRODUCTION,
    METRICS,
    NUM_EXAMPLES,
    PACE,
    TOGETHER,
)
from flwr_distill.protocol.registry import (
    all_methods,
    check_config,
    find_method,
    handlers,
    plugin_paths,
)
from flwr_distill.task.compute.precision import products_in
from flwr_distill.task.datasets import DatasetError
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.evaluation import count
from flwr_distill.task.image_files import class_names
from flwr_distill.task.plugin import PluginError, import_object, located, raised_in
from flwr_distill.task.readers import data_reader
from flwr_distill.task.scores import MAX_CLASSES, Counts
from flwr_distill.task.source import check_columns, open_columns

MIN_ROWS = 10
"""Rows of a table whose means leave a node."""
Handler = Callable[[Message, Context], Message]


class MethodApp(ClientApp):
    """A ClientApp that serves the message types of all installed methods."""

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message; a plug-in's failure becomes a `PluginError` with its file and line."""
        message.content.pop(PACE, None)
        if EDGE in context.node_config:
            return pass_down(message, context)
        with products_in("float32"):  # whatever PyTorch's defaults on a GPU
            try:
                return summed(message, context, self._handler(message, context))
            except SettingsError:
                raise
            except Exception as error:
                named = [value for value in context.run_config.values() if ":" in str(value)]
                paths = [*plugin_paths(), *map(str, named)]
                if raised_in(error, paths):
                    what = ", ".join(["plug-in", *getattr(error, "__notes__", ())])
                    raise PluginError(f"{what} failed: {located(error, *paths)}") from error
                raise

    def _handler(self, message: Message, context: Context) -> Handler:
        message_type = message.metadata.message_type
        if "." not in message_type:  # Flower's own: train, evaluate
            return super().__call__
        paths = handlers()
        if message_type not in paths:
            raise _not_installed(f"handler of {message_type}", context)
        handler: Handler = import_object(paths[message_type])  # type: ignore[assignment]
        return handler


app = MethodApp()


def describe_columns(message: Message, context: Context) -> Message:
    """Reply with mean and variance of the columns that the run has nodes standardise.

    With ``secure-sums``, sums and sums of squares, which leave under masks.

    Raises
    ------
    SettingsError
        If there are no such columns, differential privacy is on, there are so few rows that their
        means nearly show them, or a column does not fit into secure sums.
    """
    task = source_of(context).task(context)
    check_columns(task)
    moments = Session.of(context, scaled=False).own.moments
    if moments is None or not moments.mean:
        raise SettingsError("this run standardises no column by this node's values")
    if moments.rows < MIN_ROWS:
        raise SettingsError(
            f"need {MIN_ROWS} rows: means of so few would nearly show them",
            where="rows of this node's table",
            value=moments.rows,
            remedy="the run uses other nodes' means",
        )
    if context.run_config.get("secure-sums"):  # of nodes, not of samples: their rows are a sum too
        rows, columns = 1, record_of_sums(moments, open_columns(task))
    else:
        rows, columns = moments.rows, record_of_columns(moments)
    content = RecordDict({METRICS: MetricRecord({NUM_EXAMPLES: rows}), COLUMNS: columns})
    return Message(content, reply_to=message)


def describe(message: Message, context: Context) -> Message:
    """Describe this node: its name, its data, how to send to it, or what is missing.

    Without the classes of its samples where the run has differential privacy.
    """
    record = message.content.config_records.get(CONFIG)
    requirement = None if record is None else Requirement.checked(record, "message")
    if requirement and (scale := requirement.scale):
        keep_scale(store_of(context), scale)
    reasons = missing_for(context, requirement)
    for reason in reasons:
        log(WARNING, "This node cannot take part in run %d: %s", context.run_id, reason)
    metrics, config = identity(context.node_config)
    content = RecordDict({METRICS: metrics})
    if names := _class_names(context):
        config["class-names"] = names
    if reasons:
        config["missing"] = reasons
    else:
        session = Session.of(context, scaled=False)
        config["device"] = str(session.device)
        metrics[NUM_EXAMPLES] = len(session.own.train)
        if trains_together(context, session):
            metrics[TOGETHER] = 1
        content[INTRODUCTION] = introduce(session)
        config[FINGERPRINT] = session.store.keyed(session.own.fingerprint)
        config.update(place_secrets(session.store, requirement.resumes if requirement else ""))
        if not _has_privacy(context, requirement):
            config["classes"] = torch.unique(session.own.train.labels).tolist()
    if config:
        content[CONFIG] = ConfigRecord(config)
    return Message(content, reply_to=message)


def continue_run(message: Message, context: Context) -> Message:
    """Take over this node's files of the run that this one resumes."""
    session = Session.of(context)
    earlier = Continuation.checked(message.content.config_records[CONFIG], "message")
    files = session.store.take_over(earlier.run_id, earlier.node_id, earlier.round)
    text = "Resuming run %s after round %d: %s"
    log(INFO, text, earlier.run_id, earlier.round, counted(files, "file"))
    return Message(RecordDict({METRICS: MetricRecord({"files": files})}), reply_to=message)


def clipped(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """Flower's mod that clips the update, for messages with a clipping norm only.

    It also reports whether the update was longer (``norm_bit``). Virtual nodes then train one by
    one.
    """
    if CLIPPING_NORM not in message.content.config_records.get(CONFIG, ConfigRecord()):
        return call_next(message, context)
    message.content.pop(TOGETHER, None)
    return adaptiveclipping_mod(message, context, call_next)


@app.train(mods=[clipped])
def train(message: Message, context: Context) -> Message:
    """Train the received model on the node's data (Flower's plain contract).

    The message's config may override any key of ``train.*``, such as ``lr``. Other records ask for
    loss terms. A record or key that nothing here reads is a SettingsError.
    """
    records = unread_records(message.content)
    if records:
        raise _no_term(min(records), context)
    check_config(message)
    reply = trained_together(context, message.content)
    if reply is None:
        session = Session.of(context)
        local = LocalRound.of(session, message.content)
        reply = local.train(session.data.train)
        reply[ARRAYS] = local.trained_model()
    return Message(reply, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate the received model on the node's holdout (Flower's plain contract).

    With ``evaluate.counts`` the reply has counts, too, or why there are none.
    """
    check_config(message)
    session = Session.of(context)
    holdout = held_out(session)
    holdout = replace(holdout, inputs=as_seen(session, holdout.inputs))
    model = build_model(session, received_arrays(message.content))
    counts, loss = count(model, holdout, session.device)
    accuracy = int(counts.confusion.trace()) / len(holdout)
    metrics = MetricRecord(
        {NUM_EXAMPLES: len(holdout), "eval-accuracy": accuracy, "eval-loss": loss}
    )
    reply = RecordDict({METRICS: metrics})
    if session.task.evaluate.counts:
        reply[COUNTS] = _counts_of(counts, context)
    return Message(reply, reply_to=message)


def _counts_of(counts: Counts, context: Context) -> ConfigRecord:
    """The record of counts; with differential privacy only where the node puts noise on them."""
    if _has_privacy(context, None) and not context.node_config.get(COUNTS_EPSILON):
        log(INFO, "No counts of held-out samples are sent: %s", REASONS["privacy"])
        return no_counts("privacy")
    if len(counts.confusion) > MAX_CLASSES:
        return no_counts("classes")
    return counts_record(counts)


def unread_records(content: RecordDict) -> set[str]:
    """Names of the records of a plain train message that no installed loss term reads."""
    read = {CONFIG, TOGETHER, *(key for method in all_methods().values() for key in method.terms)}
    model = [ARRAYS] if ARRAYS in content else list(content.array_records)[:1]
    return set(content) - read - set(model)


def _no_term(record: str, context: Context) -> SettingsError:
    method = find_method(str(context.run_config.get("strategy", "")))
    if method is None:
        return _not_installed(f"loss term of record {record!r}", context)
    declared = ", ".join(method.terms) or "none"
    return SettingsError(
        f"no loss term reads the record {record!r} of its train messages",
        where="strategy",
        value=method.name,
        remedy=f"declare it in `terms` of the method, which has {declared}",
    )


def _not_installed(what: str, context: Context) -> SettingsError:
    return SettingsError(
        f"no {what} is installed on this node",
        where="strategy",
        value=context.run_config.get("strategy", ""),
        remedy="install its package with pip where the node runs, and start the run again",
    )


def _class_names(context: Context) -> list[str]:
    """Names of all classes by this node's images, if the run has not named them."""
    path, source = context.node_config.get("data"), source_of(context)
    if path is None or source != RunSource() or data_reader(Path(str(path))) is None:
        return []
    try:
        spec = source.spec(context, source.task(context))
        return [] if spec.labels.classes else list(class_names(str(path)) or spec.class_names)
    except (DatasetError, SettingsError):
        return []  # it is among what is missing


def _has_privacy(context: Context, requirement: Requirement | None) -> bool:
    """Whether a setting of the run, or of its method, asks for differential privacy."""
    arguments = read_arguments(str(context.run_config.get("strategy-args", "")), "strategy-args")
    settings = {
        **context.run_config,
        **{name.replace("_", "-"): value for name, value in arguments.items()},
        **(json.loads(requirement.settings) if requirement else {}),
    }
    return any(
        value
        for key, value in settings.items()
        if key.rpartition(".")[2] in ("dp-noise", "dp-epsilon")
    )
