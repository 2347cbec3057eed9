"""A round of local training, as requested by a train message."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import nn

from flwr_distill.client.dp_sgd import PrivateTraining
from flwr_distill.client.features import as_seen
from flwr_distill.client.session import Session, Source, check_unchanged
from flwr_distill.client.terms import loss_terms
from flwr_distill.client.training import train_round
from flwr_distill.protocol.arrays import Arrays, as_arrays, load_arrays, record_of
from flwr_distill.protocol.messages import ARRAYS, CONFIG, METRICS, NUM_EXAMPLES, SERVER_ROUND
from flwr_distill.task.augmentation import chosen_changes
from flwr_distill.task.backbones import copy_to_train
from flwr_distill.task.backbones import fingerprint as frozen_fingerprint
from flwr_distill.task.datasets import DataSpec, Samples
from flwr_distill.task.file_state import read_once
from flwr_distill.task.settings import Change, TaskSettings, TrainSettings


@dataclass(frozen=True)
class LocalRound:
    """A train message, read.

    Parameters
    ----------
    session : Session
        The node's, with the store of the round.
    settings : TrainSettings
        The run's, overridden by the message's config.
    model : nn.Module
        The received model, on the node's device.
    """

    session: Session
    content: RecordDict
    settings: TrainSettings
    model: nn.Module

    @classmethod
    def of(
        cls, session: Session, content: RecordDict, arrays: Arrays | None = None
    ) -> "LocalRound":
        """Read a train message, whose config may have any key of ``train.*``, such as ``lr``.

        `arrays` are the global model, if it is not in the message.
        """
        config = content.config_records.get(CONFIG, ConfigRecord())
        settings = session.task.train.model_dump(by_alias=True)
        settings.update({key: value for key, value in config.items() if key in settings})
        return cls(
            session=session.in_round(server_round(config)),
            content=content,
            settings=TrainSettings.checked(settings, "message"),
            model=build_model(session, received_arrays(content) if arrays is None else arrays),
        )

    @property
    def round(self) -> int:
        """The round."""
        return server_round(self.content.config_records.get(CONFIG, ConfigRecord()))

    @property
    def changes(self) -> tuple[Change, ...]:
        """Random changes of training images (``train.augment``)."""
        return chosen_changes(self.settings.augment, self.session.own.spec)

    def train(
        self, samples: Samples, *, balanced: bool = False, average_last: float = 0.0
    ) -> RecordDict:
        """Train the model in place, with differential privacy if the settings ask for it.

        Parameters
        ----------
        balanced : bool (default: False)
            Whether classes are drawn evenly.
        average_last : float (default: 0.0)
            See :func:`client.training.train_round`.

        Returns
        -------
        RecordDict
            The metrics, and the loss terms' records.
        """
        if not self.changes:
            samples = replace(samples, inputs=as_seen(self.session, samples.inputs))
        terms = loss_terms(self.session, self.content, self.model, self.settings)
        privacy = PrivateTraining.of(self.session, self.settings)
        trained = train_round(
            self.model,
            samples,
            self.settings,
            self.session.generator("train", self.round),
            balanced=balanced,
            average_last=average_last,
            changes=self.changes,
            terms=terms,
            privacy=privacy,
        )
        numbers: dict[str, Any] = {NUM_EXAMPLES: len(samples), **trained.numbers()}
        if privacy:
            numbers |= privacy.account.numbers(len(samples))
        reply = RecordDict({METRICS: MetricRecord(numbers)})
        for term in terms:
            reply.update(term.finish(self.model, trained.steps))
        return reply

    def trained_model(self) -> ArrayRecord:
        """The current model, for the reply."""
        return record_of(self.model)


def received_arrays(content: RecordDict) -> Arrays:
    """The model in a message; of several array records the one called ``arrays``."""
    records = content.array_records
    return as_arrays(records.get(ARRAYS) or next(iter(records.values())))


def build_model(session: Session, arrays: Arrays) -> nn.Module:
    """Build the run's model with these weights, on the node's device."""
    start = session.run_id, session.source, session.task, session.own.spec
    own, fingerprint = start_of(*start)
    files = _weights(*start)
    check_unchanged(session.store, "weights", fingerprint.encode(), files)
    model = copy_to_train(own)
    load_arrays(model, arrays)
    return model.to(session.device)


def _weights(run_id: int, source: Source, task: TaskSettings, spec: DataSpec) -> list[Path]:
    return [Path(task.backbone.weights)] if task.backbone.weights else []


@read_once(_weights, maxsize=4)  # virtual nodes of a simulation share a process
def start_of(
    run_id: int, source: Source, task: TaskSettings, spec: DataSpec
) -> tuple[nn.Module, str]:
    """The model that a run starts with, and the fingerprint of its frozen part."""
    model = source.model(task, spec)
    return model, frozen_fingerprint(model)


def server_round(config: ConfigRecord) -> int:
    """The round of a message; 0 if it does not say."""
    number = config.get(SERVER_ROUND, 0)
    return number if isinstance(number, int) else 0
