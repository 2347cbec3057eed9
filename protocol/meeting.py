"""The first meeting of server and node: who it is, and what it kept of an earlier run."""

from typing import Annotated

from pydantic import Field

from links.records import Introduction, NodeId
from protocol.messages import CONFIG, INTRODUCTION
from protocol.method import Method, Phase
from protocol.schema import Reply
from task.settings import Block

DESCRIBE = "query.describe"
"""Ask a node who it is: partition, sector, samples, data set of its own, and how to send to it."""

CONTINUE = "query.continue_run"
"""Have a node take over what it kept in the run that this one goes on from."""


class Requirement(Block):
    """The plug-in that a run needs on nodes; part of a describe message where there is one.

    Parameters
    ----------
    method : str
        Name of the method.
    package : str
        Distribution that brings it, ``name==version``.
    """

    method: str
    package: str


class DescribeMetrics(Block):
    """Numbers by which a node describes itself.

    Parameters
    ----------
    num_examples : int
        Training samples.
    partition_id : int, optional
        Its partition, where it has one.
    sector : int, optional
        The sector that its owner gave it.
    """

    num_examples: Annotated[int, Field(ge=0, lt=2**63)]
    partition_id: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    sector: Annotated[int, Field(ge=0, lt=2**63)] | None = None


class DescribeConfig(Block):
    """Text by which a node describes itself.

    Parameters
    ----------
    dataset : str
        The data set that it holds in place of the run's.
    """

    dataset: Annotated[str, Field(min_length=1, max_length=200)]


class Continuation(Block):
    """The run that this one goes on from, for a node that took part in it.

    Parameters
    ----------
    run_id : str
        Flower's id of that run.
    node_id : str
        The node's id in it.
    round : int
        The last round that counts.
    """

    run_id: NodeId
    node_id: NodeId
    round: Annotated[int, Field(ge=0)]


class ContinueMetrics(Block):
    """Reply to a continuation.

    Parameters
    ----------
    files : int
        Files taken over.
    """

    files: Annotated[int, Field(ge=0)]


def requirement_of(method: Method | None) -> Requirement | None:
    """What nodes need for a method; None for one of ours, which they have."""
    if method is None or not method.package:
        return None
    return Requirement(method=method.name, package=method.package)


PHASES = (
    Phase(
        DESCRIBE,
        "nodes say who they are",
        (
            Reply(
                metrics=DescribeMetrics,
                configs={INTRODUCTION: Introduction, CONFIG: DescribeConfig},
                optional={INTRODUCTION, CONFIG},
            ),
        ),
        "client.app:describe",
    ),
    Phase(
        CONTINUE,
        "nodes take over what they kept",
        (Reply(metrics=ContinueMetrics),),
        "client.app:continue_run",
    ),
)
