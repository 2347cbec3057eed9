"""FedSeq of Zaccone et al. on nodes: what a model trained on their data alone predicts."""

import math
from collections.abc import Callable, Iterator
from functools import partial

from flwr.app import Context, Message, MetricRecord, RecordDict

from flwr_distill.client.auxiliary import auxiliary_of
from flwr_distill.client.dp_sgd import PrivateTraining
from flwr_distill.client.session import Session
from flwr_distill.client.training import soft_labels
from flwr_distill.protocol.messages import CONFIG, METRICS, NUM_EXAMPLES
from flwr_distill.task.auxiliary_names import NOISE
from flwr_distill_baselines.fedseq_zaccone.method import CONFIDENCE, FedSeqSettings, Pretraining


def needs(session: Session, settings: FedSeqSettings) -> Iterator[Callable[[], object]]:
    """A call that fails where the node is missing the auxiliary set."""
    if settings.auxiliary != NOISE:
        yield partial(auxiliary_of, session, settings.auxiliary, settings.auxiliary_size)


def report_confidence(message: Message, context: Context) -> Message:
    """Reply with the mean prediction of a model that was trained on the node's data alone."""
    session = Session.of(context)
    request = Pretraining.checked(message.content.config_records[CONFIG], "message")
    samples, settings = session.data.train, session.task.train
    privacy = PrivateTraining.of(session, settings)
    labels = soft_labels(
        session.new_model().to(session.device),
        samples,
        auxiliary_of(session, request.auxiliary, request.auxiliary_size).to(session.device),
        steps=request.pretraining_epochs * math.ceil(len(samples) / settings.batch_size),
        lr=settings.lr,
        batch_size=settings.batch_size,
        generator=session.generator("fedseq-confidence"),
        privacy=privacy,
    )
    confidence = labels.double().mean(0).tolist()
    metrics = MetricRecord({NUM_EXAMPLES: len(samples), CONFIDENCE: confidence})
    if privacy:
        metrics.update(privacy.account.numbers(len(samples)))
    return Message(RecordDict({METRICS: metrics}), reply_to=message)
