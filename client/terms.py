"""Loss terms, which methods add to the cross-entropy of local training."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from logging import WARNING
from typing import Any, ClassVar, Literal, Self, get_args

import torch
from flwr.app import ConfigRecord, RecordDict
from flwr.common import log
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from flwr_distill.client.session import Session
from flwr_distill.protocol.messages import CONFIG
from flwr_distill.protocol.method import Method
from flwr_distill.protocol.registry import all_methods
from flwr_distill.task.errors import ReportedError, SettingsError
from flwr_distill.task.models import last_dense
from flwr_distill.task.plugin import PluginError, import_object
from flwr_distill.task.settings import TrainSettings

Mixes = Literal["weights", "sample", "minibatch"]


class TermError(ReportedError, RuntimeError):
    """A loss term returned something that cannot be added to a loss."""


class LossTerm(ABC):
    """Added to the cross-entropy of each minibatch; a new one in each round.

    Attributes
    ----------
    mixes : str
        What the value depends on, which decides its treatment under differential privacy:
        ``weights`` alone (its gradient joins the noisy one), each ``sample`` separately (clipped
        with that sample's loss), or the ``minibatch`` as a whole (refused, the default).
    method : str
        Name of the method that declares it, for errors; set by `loss_terms`.
    """

    mixes: ClassVar[Mixes] = "minibatch"
    method: str = ""

    @classmethod
    @abstractmethod
    def of(
        cls, session: Session, content: RecordDict, model: nn.Module, settings: TrainSettings
    ) -> Self | None:
        """Make the term that a train message asks for; None if there is nothing to add.

        Parameters
        ----------
        session : Session
            The node's, in the round.
        content : RecordDict
            Of the train message.
        model : nn.Module
            The global model, before training.
        settings : TrainSettings
            Settings of the round.

        Raises
        ------
        SettingsError
            If the message is malformed, or the settings exclude the term.
        """

    @abstractmethod
    def __call__(self, inputs: Tensor, labels: Tensor, logits: Tensor) -> Tensor:
        """Value of the term on a minibatch: a scalar, differentiable in the model's parameters.

        Parameters
        ----------
        inputs : Tensor
            The minibatch, (n, ...).
        labels : Tensor
            Its classes, (n,), or soft labels (n, classes).
        logits : Tensor
            Output of the model in training, (n, classes).
        """

    def finish(self, model: nn.Module, steps: int) -> Mapping[str, Any]:
        """After training: store what the next round needs; return records for the reply, by name.

        `steps` is the number of optimisation steps taken.
        """
        return {}


class Proximal(LossTerm):
    """``mu/2 ||w - w_t||^2`` (Li et al. 2020, eq. 2); w_t is `model` as it is now."""

    mixes = "weights"

    def __init__(self, model: nn.Module, mu: float) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._start = [p.detach().clone() for p in self._parameters]
        self._mu = mu

    @classmethod
    def of(
        cls, session: Session, content: RecordDict, model: nn.Module, settings: TrainSettings
    ) -> Self:
        """Make the term, weighted by ``train.proximal-mu``."""
        return cls(model, settings.proximal_mu)

    def __call__(self, inputs: Tensor, labels: Tensor, logits: Tensor) -> Tensor:
        """The term's value, which does not depend on the minibatch."""
        pairs = zip(self._parameters, self._start, strict=True)
        return self._mu / 2 * torch.stack([(p - w).square().sum() for p, w in pairs]).sum()


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
        for key in method.terms:
            if key in content or numbers.get(key, config.get(key)):
                term = term_class(method, key).of(session, content, model, settings)
                if term is not None:
                    term.method = method.name
                    terms.append(term)
    return terms


def term_class(method: Method, key: str) -> type[LossTerm]:
    """Import a method's loss term by what asks for it; SettingsError if it cannot be used."""
    where, path = f"loss term of {method.name!r}", method.terms[key]
    try:
        term = import_object(path)
    except PluginError as error:
        raise SettingsError(str(error), where=where) from error
    if not (isinstance(term, type) and issubclass(term, LossTerm)):
        raise SettingsError(
            "not a LossTerm", where=where, value=path, remedy=f"derive it from {__name__}.LossTerm"
        )
    if missing := term.__abstractmethods__:  # without `of` it would be ignored in silence
        names = ", ".join(sorted(missing))
        raise SettingsError(
            f"it does not define {names}", where=where, value=path, remedy="see docs/plugins.md"
        )
    if term.mixes not in get_args(Mixes):
        allowed = ", ".join(get_args(Mixes))
        raise SettingsError(f"its mixes is not one of {allowed}", where=where, value=term.mixes)
    return term


def title_of(term: LossTerm | type[LossTerm], method: str) -> str:
    """Name of a term with that of its method, for errors."""
    name = (term if isinstance(term, type) else type(term)).__name__
    return f"loss term {name} of {method!r}" if method else f"loss term {name}"


def value_of(term: LossTerm, inputs: Tensor, labels: Tensor, logits: Tensor) -> Tensor:
    """Value of a term on a minibatch; an error that it raises gets a note which names it.

    Raises
    ------
    TermError
        If the value is not a scalar.
    """
    try:
        value = term(inputs, labels, logits)
    except Exception as error:
        error.add_note(title_of(term, term.method))
        raise
    if not isinstance(value, Tensor) or value.ndim:
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise TermError(
            "its value must be a scalar",
            where=title_of(term, term.method),
            value=shape,
            remedy="return the mean over the minibatch, as in values.mean()",
        )
    return value


class Features:
    """Records the input of a model's last dense layer in each forward pass.

    Parameters
    ----------
    model : nn.Module
        Any model with a dense layer; it keeps a forward hook.
    layer : str (default: "")
        Name of the layer; see :func:`task.models.last_dense`.

    Attributes
    ----------
    last : Tensor
        Features of the last minibatch, (n, d), part of its graph.
    """

    def __init__(self, model: nn.Module, layer: str = "") -> None:
        self.last: Tensor
        dense = model.get_submodule(last_dense(model, layer))
        dense.register_forward_pre_hook(self._record)

    def _record(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        self.last = arguments[0]


def extractor(model: nn.Module, layer: str = "") -> Callable[[Tensor], Tensor]:
    """A copy of a model, in evaluation mode, as a function from images to features."""
    model = copy.deepcopy(model).eval()  # the hook must not stay in a model that is trained
    features = Features(model, layer)

    def extract(images: Tensor) -> Tensor:
        model(images)
        return features.last

    return extract


def store_tensors(session: Session, name: str, tensors: Mapping[str, Tensor]) -> None:
    """Store tensors for later rounds, unless a value is not finite: then the old ones stay."""
    if not all(tensor.isfinite().all() for tensor in tensors.values()):
        log(WARNING, "The new %s has NaN or infinity and is not stored", name)
        return
    # Clones, because safetensors refuses tensors that share memory, as tied weights do.
    clones = {key: t.detach().cpu().clone().contiguous() for key, t in tensors.items()}
    session.store.write(name, save(clones))


def stored_tensors(
    session: Session, name: str, like: Mapping[str, Tensor]
) -> dict[str, Tensor] | None:
    """Stored tensors, on the devices of ``like``; None if missing or of other shapes."""
    payload = session.store.read(name)
    if payload is None:
        return None
    try:
        tensors = load(payload)
    except SafetensorError as error:
        log(WARNING, "The node's %s cannot be read and starts from scratch: %s", name, error)
        return None
    if {key: t.shape for key, t in tensors.items()} != {key: t.shape for key, t in like.items()}:
        log(WARNING, "The node's %s is of another model and starts from scratch", name)
        return None
    return {key: tensors[key].to(tensor.device) for key, tensor in like.items()}


def zeros(like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Zeros of the same names, shapes and devices."""
    return {key: tensor.detach().new_zeros(tensor.shape) for key, tensor in like.items()}
