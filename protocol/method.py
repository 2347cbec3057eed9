"""Declaration of a method: all that server, nodes and report need of it, in one place.

Declarations name code as ``module:attribute``, so that the server reads one without importing
node code, and a node without importing server code.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from flwr.app import RecordDict

from flwr_distill.links.records import VIRTUAL_DATA
from flwr_distill.protocol.arrays import Arrays
from flwr_distill.protocol.schema import (
    EVALUATE_AND_COUNT,
    EVALUATE_REQUEST,
    TRAIN,
    TRAIN_REQUEST,
    Reply,
    Request,
)
from flwr_distill.task.settings import Block, RunConfigValue, TrainSettings

CHOICE = "choice.json"
"""File of a run's result in which a strategy that leaves the run to others names these: a JSON
object with a list ``tried`` of objects with the key ``strategy``. The report then says what each of
them discloses."""

ConfigValues = Mapping[str, Mapping[str, object]]
"""Values of a message's config records, by record and key."""


@dataclass(frozen=True)
class Phase:
    """Messages of one type to nodes, and their replies.

    Parameters
    ----------
    message_type : str
        Flower's: a category (``train``, ``query`` or ``evaluate``) and an action.
    title : str
        What happens in it, for log and report: "members distil their data".
    replies : tuple of Reply
        Schemas; a reply must fit one of them.
    handler : str (default: "")
        ``module:function`` on the node, ``(message, context) -> message`` as Flower's are.
    request : Request, optional (default: None)
        Records and keys that its messages may contain. A node whose policy has ``settings: listed``
        refuses any other, and every message of a phase without one.
    leaves : str (default: "")
        What its answers contain that was made from samples, for docs/what-leaves.md.
    rates : tuple of str (default: ())
        Metrics of its answers that are shares of the node's held-out samples, of which the received
        model alone decides. A policy with ``evaluation-epsilon`` adds noise to these, drops other
        metrics, and refuses phases that evaluate and name none.
    covered : tuple of str (default: ())
        Metrics of its answers that may leave a node with differential privacy: counts, and what
        follows from a model under it. For plug-ins, whose other metrics count as exact numbers of
        samples; `node.listed` has those of built-in methods.
    single : bool (default: True)
        Whether arrays in its answers that secure sums do not mask reveal as much as a single node's
        model. A policy with ``single-updates: never`` refuses these, and so do nodes in a run with
        ``secure-sums``. Soft labels do not.
    quorum : bool (default: False)
        Whether a share ``quorum`` of the nodes must send usable replies.
    needed : bool (default: False)
        Whether a round has failed if no node sends a usable reply. A round without a new model has
        failed in any case.
    averaged : str (default: "")
        By which numbers of samples replies are averaged; empty if they are not. ``own``: at most
        what a node said at the first meeting; with `rates` as many as others' claims allow.
        ``pool``: what it claims, as nodes train on more than their own samples; the strategy limits
        these. Averaged replies are compared: one is rejected if it is missing what most have, or a
        norm is absurdly large beside the others.
    summed : callable, optional (default: None)
        Given a message's content and the model in it, returns the array records of answers, by
        name, as arrays of the same shapes: secure sums (`Method.summed`, and all phases of the
        first meeting that have it) have the mean of these. Where the model is among them, nodes
        shorten what they send to ``secure-sums-norm``. None for a model alone.
    own : tuple of str (default: ())
        ``record.key`` of what differs between nodes in its messages. All else is the same for all
        nodes of a secure sum.
    epsilon : callable, optional (default: None)
        Epsilon that a whole run costs each sample, if these answers follow from data that the
        method itself has put under differential privacy, without ``train.dp-noise``; else 0. Given
        the method's settings; on nodes also a message's values, read as the handler reads them.
    """

    message_type: str
    title: str
    replies: tuple[Reply, ...]
    handler: str = ""
    request: Request | None = None
    leaves: str = ""
    rates: tuple[str, ...] = ()
    covered: tuple[str, ...] = ()
    single: bool = True
    quorum: bool = False
    needed: bool = False
    averaged: Literal["", "own", "pool"] = ""
    summed: Callable[[RecordDict, Arrays], Mapping[str, Arrays]] | None = None
    own: tuple[str, ...] = ()
    epsilon: Callable[..., float] | None = None

    @property
    def shows_single(self) -> bool:
        """Whether the server may read a single node's model, or virtual data, in an answer."""
        return self.single and any(
            reply.arrays or VIRTUAL_DATA in reply.configs for reply in self.replies
        )


@dataclass(frozen=True)
class Method:
    """A method: a strategy, and its settings, phases, loss terms, formulas and panels.

    Parameters
    ----------
    name : str
        As in ``strategy = "name"``.
    strategy : str (default: "")
        ``module:Class`` of a Flower strategy, at the module that defines it. If the class has
        ``from_run(settings, run, **arguments)``, it is made by that (see
        :class:`strategies.common.run.Run`); else its constructor gets the settings by name. Empty
        for a package that brings only models, data sets or distillers.
    summary : str (default: "")
        One sentence on what it does.
    settings : type[Block], optional (default: None)
        Its table of the run config.
    table : str (default: "")
        Name of that table; the method's own if empty. Methods may share one.
    phases : tuple of Phase
        Its message types; one of Flower's (``train``) replaces the phase that all methods have.
    terms : Mapping[str, str]
        ``module:Class`` of loss terms (:class:`client.terms.LossTerm`), by the record or the key of
        the train config by which a train message asks for it.
    needs : str (default: "")
        ``module:function`` on the node, ``(session, settings) -> iterable of calls``, that a node
        makes before the run: one that raises names something that is missing, with the remedy.
        ``settings`` are the method's.
    unprotected : callable, optional (default: None)
        Given the method's settings and those of training, returns what differential privacy would
        not cover, with the remedy; an empty text if it covers all. None means all is covered if
        the method has no phases or terms of its own, else that it is unknown.
    summed : tuple of str
        Message types whose answers are models, or the arrays that their phases name
        (`Phase.summed`), of which the strategy needs only the mean, weighted by samples: with
        ``secure-sums`` the server sees no single one. A method that reads single ones, or other
        metrics of them, names none; one whose settings decide refuses these in ``from_run``.
    coded : tuple of str
        Array records beside the model that the run's codecs may be used for, in messages and in
        answers to them. What an answer leaves out is added to the next one that counts.
    outcome : str (default: "trained")
        What a run makes: ``trained``, a model from the one before; ``solved``, a model that is
        complete after one round, whatever came before, so that other strategies can start from it
        (setting ``start``); ``personal``, models that stay on nodes. There is then no global one to
        evaluate, save and export, and the run's accuracy is that of nodes on held-out samples.
    formulas : str (default: "")
        ``module:function`` that gives the expected traffic of a run in bits, by formula:
        ``(strategy, num_nodes, num_weights, num_rounds) -> dict``.
    panels : tuple of str
        ``module:function`` of sections of the report: ``(run) -> Section or None``.
    disclosed : callable, optional (default: None)
        Given the method's settings, returns what leaves nodes besides models and virtual data, for
        report and model card; an empty text if nothing.
    defaults : Mapping[str, Mapping[str, bool, int, float or str]]
        Other defaults of run-config keys, by occasion: ``defence`` for ``defence = "on"``, the
        rules against hostile nodes that fit the method; ``edge`` for a run below an edge. In the
        former, ``strategy`` replaces the method by another, which gets no ``strategy-args``.
    models, datasets, distillers : Mapping[str, str]
        ``module:attribute`` of further ones, by name.
    package : str (default: "")
        Distribution that it was installed with, ``name==version``; set by the registry.
    """

    name: str
    strategy: str = ""
    summary: str = ""
    settings: type[Block] | None = None
    table: str = ""
    phases: tuple[Phase, ...] = ()
    terms: Mapping[str, str] = field(default_factory=dict)
    needs: str = ""
    unprotected: Callable[[Any, TrainSettings], str] | None = None
    summed: tuple[str, ...] = ()
    coded: tuple[str, ...] = ()
    outcome: Literal["trained", "solved", "personal"] = "trained"
    formulas: str = ""
    panels: tuple[str, ...] = ()
    disclosed: Callable[[Any], str] | None = None
    defaults: Mapping[str, Mapping[str, RunConfigValue]] = field(default_factory=dict)
    models: Mapping[str, str] = field(default_factory=dict)
    datasets: Mapping[str, str] = field(default_factory=dict)
    distillers: Mapping[str, str] = field(default_factory=dict)
    package: str = ""

    @property
    def table_name(self) -> str:
        """Name of its table of settings."""
        return self.table or self.name

    @property
    def trains_plainly(self) -> bool:
        """Whether it needs more of Flower's plain ``train`` messages than a trained model."""
        types = {phase.message_type for phase in self.phases}
        own = any(name.startswith("train.") for name in types)
        return "train" in types or bool(self.terms and not own)

    def epsilon(self, settings: Any) -> float:
        """Epsilon of a run by `Phase.epsilon`; 0 if other answers than these cost more."""
        epsilons = [phase.epsilon(settings) for phase in self.phases if phase.epsilon]
        return max(epsilons) if epsilons and min(epsilons) > 0 else 0.0


def all_protected(settings: Any, train: TrainSettings) -> str:
    """`Method.unprotected` of a method that differential privacy covers completely."""
    return ""


TRAIN_PHASE = Phase(
    "train",
    "nodes train",
    (TRAIN,),
    request=TRAIN_REQUEST,
    leaves="the model, trained on its samples",
    quorum=True,
    averaged="own",
)
EVALUATE_PHASE = Phase(
    "evaluate",
    "nodes evaluate",
    (EVALUATE_AND_COUNT,),
    request=EVALUATE_REQUEST,
    leaves="accuracy and loss on held-out samples, and their number; with `evaluate.counts` counts "
    "of these",
    rates=("eval-accuracy",),
    averaged="own",
)
