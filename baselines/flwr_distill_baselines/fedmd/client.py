"""FedMD on nodes: the node's own model learns the consensus, and its own samples again."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor, nn
from torch.nn import functional

from flwr_distill.client.auxiliary import auxiliary_of, labelled_auxiliary
from flwr_distill.client.dp_sgd import require_no_privacy
from flwr_distill.client.local_round import LocalRound
from flwr_distill.client.own_model import keep_own_model, own_model, with_own_model
from flwr_distill.client.session import Session, common_test_set, held_out
from flwr_distill.client.training import epoch_batches, train_round
from flwr_distill.protocol.arrays import arrays_of
from flwr_distill.protocol.messages import METRICS, NUM_EXAMPLES
from flwr_distill.task.auxiliary_names import RESERVED
from flwr_distill.task.evaluation import evaluate_model, outputs
from flwr_distill.task.models import last_dense, last_dense_layer
from flwr_distill_baselines.fedmd.method import DIGEST, LOGITS, FedMDSettings


def needs(session: Session, settings: FedMDSettings) -> Iterable[Callable[[], object]]:
    """Calls that fail where the node is missing its own architecture or the public samples."""
    own = with_own_model(session)
    yield own.new_model
    yield lambda: auxiliary_of(session, settings.auxiliary, settings.auxiliary_size)
    if settings.public_epochs:
        yield lambda: labelled_auxiliary(session, settings.auxiliary, settings.auxiliary_size)
    if settings.test_set:
        yield lambda: common_test_set(session)


def train_consensus(message: Message, context: Context) -> Message:
    """Digest the consensus, revisit the node's own samples, and reply with logits.

    A node without a model of its own first trains one, on the public samples' labels and then on
    its own. If there is no consensus yet, that is all.
    """
    session, content = with_own_model(Session.of(context)), message.content
    request = FedMDSettings.checked(content.config_records[DIGEST], "message")
    model, was_kept = own_model(session)
    local = LocalRound.of(session, content, arrays_of(model))
    require_no_privacy(local.settings, "what FedMD sends of models")
    public = auxiliary_of(session, request.auxiliary, request.auxiliary_size).to(session.device)
    consensus = content.array_records.get(LOGITS)
    reply = RecordDict()
    if not was_kept:
        if request.public_epochs:
            learn_public(local, request)
        reply = _train(local, request.pretrain_epochs)
    if consensus is not None:
        target = consensus.to_torch_state_dict()[LOGITS].to(session.device)
        digest(local.model, public, target, request, session.generator("digest", local.round))
    if consensus is not None or was_kept:
        reply = _train(local, request.private_epochs)
    keep_own_model(local.session, local.model)
    reply[LOGITS] = ArrayRecord({LOGITS: logits_on(local.model, public)})
    return Message(reply, reply_to=message)


def evaluate_own(message: Message, context: Context) -> Message:
    """Evaluate the node's own model on its holdout, or on the test set."""
    session = with_own_model(Session.of(context))
    request = FedMDSettings.checked(message.content.config_records[DIGEST], "message")
    samples = common_test_set(session) if request.test_set else held_out(session)
    model, _ = own_model(session)
    accuracy, loss = evaluate_model(model, samples, session.device)
    metrics = MetricRecord(
        {NUM_EXAMPLES: len(samples), "eval-accuracy": accuracy, "eval-loss": loss}
    )
    return Message(RecordDict({METRICS: metrics}), reply_to=message)


def learn_public(local: LocalRound, request: FedMDSettings) -> None:
    """Train the model in place on the public samples' labels (Algorithm 1, transfer learning).

    Where these are another set's, a last dense layer for its classes takes the place of the model's
    meanwhile.
    """
    session, model = local.session, local.model
    public = labelled_auxiliary(session, request.auxiliary, request.auxiliary_size)
    settings = local.settings.model_copy(update={"local_epochs": request.public_epochs})
    generator = session.generator("public", local.round)
    name = last_dense(model, settings.feature_layer)
    own = last_dense_layer(model, name)
    if request.auxiliary != RESERVED:
        head = nn.Linear(own.in_features, 1 + int(public.labels.max()), device=session.device)
        for weights in head.parameters():
            nn.init.zeros_(weights)
        model.set_submodule(name, head)
    train_round(model, public.to(session.device), settings, generator)
    model.set_submodule(name, own)


def digest(
    model: nn.Module,
    inputs: Tensor,
    logits: Tensor,
    request: FedMDSettings,
    generator: torch.Generator,
) -> None:
    """Train the model in place on the mean absolute error to the consensus, by Adam.

    The published code takes this error; the paper does not say which.

    `inputs` are the public samples, (n, C, H, W), and `logits` the consensus, (n, classes).
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=request.digest_lr)
    model.train()
    for _ in range(request.digest_epochs):
        for batch in epoch_batches(logits, request.digest_batch_size, generator):
            optimizer.zero_grad(set_to_none=True)
            loss = functional.l1_loss(model(inputs[batch]), logits[batch])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()


def logits_on(model: nn.Module, inputs: Tensor) -> Tensor:
    """Logits of the model in evaluation mode, float32 (n, classes), on the CPU."""
    return outputs(model.eval(), inputs, inputs.device).float().cpu()


def _train(local: LocalRound, epochs: int) -> RecordDict:
    settings = local.settings.model_copy(update={"local_epochs": epochs})
    return replace(local, settings=settings).train(local.session.data.train)
