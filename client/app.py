"""The ClientApp: Flower's train and evaluate, the first meeting, and handlers of all methods."""

from collections.abc import Callable
from logging import INFO

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import log

from client.clipping import clipped
from client.local_round import LocalRound, build_model, received_arrays
from client.session import Session
from client.together import trained_together, trains_together
from links import introduce
from protocol.meeting import Continuation, Requirement
from protocol.messages import (
    ARRAYS,
    CONFIG,
    DATASET,
    INTRODUCTION,
    METRICS,
    NUM_EXAMPLES,
    PARTITION_ID,
    SECTOR,
    TOGETHER,
)
from protocol.registry import all_methods, find_method, handlers, plugin_paths
from protocol.words import counted
from task.compute.precision import products_in
from task.evaluation import evaluate_model
from task.plugin import PluginError, import_object, located, raised_in
from task.settings import SettingsError

Handler = Callable[[Message, Context], Message]


class MethodApp(ClientApp):
    """A ClientApp that serves the message types of all installed methods."""

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message.

        Raises
        ------
        SettingsError
            If the message is of a method that is not installed here.
        PluginError
            If a plug-in's code fails; the text has its file and line.
        """
        with products_in("float32"):  # whatever PyTorch's defaults on a GPU
            try:
                return self._handler(message, context)(message, context)
            except SettingsError:
                raise
            except Exception as error:
                named = [value for value in context.run_config.values() if ":" in str(value)]
                paths = [*plugin_paths(), *map(str, named)]
                if raised_in(error, paths):
                    raise PluginError(f"plug-in failed: {located(error, *paths)}") from error
                raise

    def _handler(self, message: Message, context: Context) -> Handler:
        message_type = message.metadata.message_type
        if "." not in message_type:  # Flower's own: train, evaluate
            return super().__call__
        paths = handlers()
        if message_type not in paths:
            raise _missing(f"handler of {message_type}", context)
        handler: Handler = import_object(paths[message_type])  # type: ignore[assignment]
        return handler


app = MethodApp()


def describe(message: Message, context: Context) -> Message:
    """Describe this node, so that the server can name and order nodes, and others send to it."""
    if CONFIG in message.content.config_records:
        _require(Requirement.checked(message.content.config_records[CONFIG], "message"))
    session = Session.of(context)
    metrics = MetricRecord({NUM_EXAMPLES: len(session.data.train)})
    if PARTITION_ID in context.node_config:
        metrics[PARTITION_ID] = session.identity
    if SECTOR in context.node_config:
        metrics[SECTOR] = int(context.node_config[SECTOR])
    if trains_together(context, session):
        metrics[TOGETHER] = 1
    content = RecordDict({METRICS: metrics, INTRODUCTION: introduce(session)})
    if DATASET in context.node_config:
        content[CONFIG] = ConfigRecord({DATASET: str(context.node_config[DATASET])})
    return Message(content, reply_to=message)


def continue_run(message: Message, context: Context) -> Message:
    """Take over this node's files of the run that this one resumes."""
    session = Session.of(context)
    earlier = Continuation.checked(message.content.config_records[CONFIG], "message")
    files = session.store.take_over(earlier.run_id, earlier.node_id, earlier.round)
    log(
        INFO,
        "Resuming run %s after round %d: %s",
        earlier.run_id,
        earlier.round,
        counted(files, "file"),
    )
    return Message(RecordDict({METRICS: MetricRecord({"files": files})}), reply_to=message)


@app.train(mods=[clipped])
def train(message: Message, context: Context) -> Message:
    """Train the received model on the node's data (Flower's plain contract).

    The message's config may override any key of ``train.*``, such as ``lr``. Other records ask for
    loss terms.

    Raises
    ------
    SettingsError
        If a record asks for a term that is not installed here.
    """
    records = unread_records(message.content)
    if records:
        raise _missing(f"loss term of record {min(records)!r}", context)
    reply = trained_together(context, message.content)
    if reply is None:
        session = Session.of(context)
        local = LocalRound.of(session, message.content)
        reply = local.train(session.data.train)
        reply[ARRAYS] = local.trained_model()
    return Message(reply, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate the received model on the node's holdout (Flower's plain contract)."""
    session = Session.of(context)
    holdout = session.data.holdout
    if not len(holdout):
        raise SettingsError(
            f"train.holdout = {session.task.train.holdout} leaves this node no sample to evaluate "
            "on (set it to 0.1, or fraction-evaluate to 0)"
        )
    model = build_model(session, received_arrays(message.content))
    accuracy, loss = evaluate_model(model, holdout, session.device)
    metrics = MetricRecord(
        {NUM_EXAMPLES: len(holdout), "eval-accuracy": accuracy, "eval-loss": loss}
    )
    return Message(RecordDict({METRICS: metrics}), reply_to=message)


def unread_records(content: RecordDict) -> set[str]:
    """Names of the records of a plain train message that no installed loss term reads."""
    read = {CONFIG, TOGETHER, *(key for method in all_methods().values() for key in method.terms)}
    model = [ARRAYS] if ARRAYS in content else list(content.array_records)[:1]
    return set(content) - read - set(model)


def _missing(what: str, context: Context) -> SettingsError:
    strategy = context.run_config.get("strategy", "")
    return SettingsError(
        f"no {what} is installed on this node: strategy = {strategy!r} comes with a package that "
        "is missing here (install it with pip where the node runs, and start the run again)"
    )


def _require(needed: Requirement) -> None:
    if find_method(needed.method) is None:
        raise SettingsError(
            f"strategy = {needed.method!r} needs a package that is missing on this node (pip "
            f"install '{needed.package}' where the node runs, and start the run again)"
        )
