"""Choice of loss terms by the train message."""

from typing import get_args

from flwr.app import ConfigRecord, RecordDict
from torch import nn

from flwr_distill.client.session import Session
from flwr_distill.client.terms.term import LossTerm, Mixes
from flwr_distill.protocol.messages import CONFIG
from flwr_distill.protocol.registry import all_methods
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.plugin import PluginError, import_object
from flwr_distill.task.settings import (
    TrainSettings,
)


def loss_terms(
    session: Session, content: RecordDict, model: nn.Module, settings: TrainSettings
) -> list[LossTerm]:
    """Make the terms of a round.

    A method declares which key asks for a term: a record of the train message, or a key of its
    config or of the run's ``train.*`` that is neither 0 nor empty.

    Raises
    ------
    SettingsError
        If a term cannot be loaded.
    """
    numbers = settings.model_dump(by_alias=True)
    config = content.config_records.get(CONFIG, ConfigRecord())
    terms = []
    for method in all_methods().values():
        for key, path in method.terms.items():
            if key in content or numbers.get(key, config.get(key)):
                terms.append(_term(method.name, path).of(session, content, model, settings))
    return [term for term in terms if term is not None]


def _term(method: str, path: str) -> type[LossTerm]:
    """A method's loss term."""
    where = f"loss term of {method!r}"
    try:
        term = import_object(path)
    except PluginError as error:
        raise SettingsError(f"{where}: {error}") from error
    if not (isinstance(term, type) and issubclass(term, LossTerm)):
        raise SettingsError(f"{where}: {path} is no LossTerm")
    if missing := term.__abstractmethods__:  # without `of` it would be left out in silence
        names = ", ".join(sorted(missing))
        raise SettingsError(f"{where}: {path} does not define {names} (see docs/plugins.md)")
    if term.mixes not in get_args(Mixes):
        allowed = ", ".join(get_args(Mixes))
        raise SettingsError(f"{where}: {path} has mixes = {term.mixes!r}, not one of {allowed}")
    return term
