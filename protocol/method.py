"""How a method declares itself: what it needs of server, nodes and report, in one place.

A method is a strategy, and whatever else it brings: settings, phases with handlers on nodes, loss
terms, formulas, panels of the report. Its declaration names the code as ``module:attribute``, so
that reading a declaration imports neither side.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from protocol.schema import EVALUATE, TRAIN, Reply
from task.settings import Block, TrainSettings


@dataclass(frozen=True)
class Phase:
    """Messages of one type to nodes, and their replies.

    Parameters
    ----------
    message_type : str
        Flower's: a category, ``train``, ``query`` or ``evaluate``, and an action.
    title : str
        What happens in it, for log and report: "members distil their data".
    replies : tuple of Reply
        What a node may reply: one of these.
    handler : str (default: "")
        ``module:function`` on the node, ``(message, context) -> message`` as Flower's are.
    quorum : bool (default: False)
        Whether a share ``quorum`` of the nodes must send something usable.
    compared : bool (default: False)
        Whether replies are averaged, so that one is judged by the others: records as most have
        them, and no claim or norm that is absurdly large beside theirs.
    """

    message_type: str
    title: str
    replies: tuple[Reply, ...]
    handler: str = ""
    quorum: bool = False
    compared: bool = False


@dataclass(frozen=True)
class Method:
    """A method, under one name.

    Parameters
    ----------
    name : str
        As in ``strategy = "name"``.
    strategy : str (default: "")
        ``module:Class`` of a Flower strategy, at the module that defines it. If the class has
        ``from_run(settings, run, **arguments)``, that makes it, see
        :class:`strategies.common.run.Run`; else its constructor gets the settings by name. Empty
        for a package that brings models, data sets or distillers alone.
    summary : str (default: "")
        One sentence on what it does.
    settings : type[Block], optional (default: None)
        Its table of the run config.
    table : str (default: "")
        Name of that table; the method's own if empty. Methods may share one.
    phases : tuple of Phase
        Its own message types; one of Flower's (``train``) in it replaces what all methods have.
    terms : Mapping[str, str]
        ``module:Class`` of loss terms (:class:`client.terms.LossTerm`), by the record or the key of
        the train config by which a train message asks for it.
    unprotected : callable, optional (default: None)
        Given the method's settings and those of training, says what of it differential privacy
        would not cover, and the remedy; an empty text if nothing. If None, nothing may be missing,
        unless it has phases or terms of its own: then it is not known.
    formulas : str (default: "")
        ``module:function`` that gives what a run should cost in bits, by formula:
        ``(strategy, num_nodes, num_weights, num_rounds) -> dict``.
    panels : tuple of str
        ``module:function`` of sections of the report: ``(run) -> Section or None``.
    disclosed : callable, optional (default: None)
        Given the method's settings, says what leaves nodes besides models and virtual data, for
        report and model card; an empty text if nothing.
    models, datasets, distillers : Mapping[str, str]
        ``module:attribute`` of further ones, by name.
    package : str (default: "")
        Distribution that it was installed with, ``name==version``; filled in where it is found.
    """

    name: str
    strategy: str = ""
    summary: str = ""
    settings: type[Block] | None = None
    table: str = ""
    phases: tuple[Phase, ...] = ()
    terms: Mapping[str, str] = field(default_factory=dict)
    unprotected: Callable[[Any, TrainSettings], str] | None = None
    formulas: str = ""
    panels: tuple[str, ...] = ()
    disclosed: Callable[[Any], str] | None = None
    models: Mapping[str, str] = field(default_factory=dict)
    datasets: Mapping[str, str] = field(default_factory=dict)
    distillers: Mapping[str, str] = field(default_factory=dict)
    package: str = ""

    @property
    def table_name(self) -> str:
        """Name of its table of settings."""
        return self.table or self.name


def all_protected(settings: Any, train: TrainSettings) -> str:
    """Answer of a method of which differential privacy covers all (`Method.unprotected`)."""
    return ""


TRAIN_PHASE = Phase("train", "nodes train", (TRAIN,), quorum=True, compared=True)
EVALUATE_PHASE = Phase("evaluate", "nodes evaluate", (EVALUATE,), compared=True)
