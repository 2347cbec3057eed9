"""First messages to a node: who it is, and what it stored in an earlier run."""

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
"""Have a node take over its files of the run that this one resumes."""


class Requirement(Block):
    """Method that a run needs on nodes, and the package (``name==version``) it comes from."""

    method: str
    package: str


class DescribeMetrics(Block):
    """A node's number of training samples, and its partition and sector if it has any.

    ``together`` is 1 for a virtual node of a simulation that trains together with others.
    """

    num_examples: Annotated[int, Field(ge=0, lt=2**63)]
    partition_id: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    sector: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    together: Annotated[int, Field(ge=0, le=1)] = 0


class DescribeConfig(Block):
    """Name of a node's own data set, used in place of the run's."""

    dataset: Annotated[str, Field(min_length=1, max_length=200)]


class Continuation(Block):
    """The run to resume: its Flower id, the node's id in it, and the last round that counts."""

    run_id: NodeId
    node_id: NodeId
    round: Annotated[int, Field(ge=0)]


class ContinueMetrics(Block):
    """Number of files taken over."""

    files: Annotated[int, Field(ge=0)]


def requirement_of(method: Method | None) -> Requirement | None:
    """What nodes must install for a method; None for ours, and if it runs no code on nodes."""
    if method is None or not method.package or not (method.phases or method.terms):
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
