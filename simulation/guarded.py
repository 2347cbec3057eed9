"""Virtual nodes with a policy: a guard of each judges its messages and replies, as a real node's.

The guards stand outside the workers, as a SuperNode stands outside its app. So a node's guard is
the same one whichever worker answers, and a worker that dies takes nothing that it counts along.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from logging import WARNING
from pathlib import Path
from typing import Any

from flwr.app import Error, Message, RecordDict
from flwr.common import log

from flwr_distill.flower.app_config import run_config_of
from flwr_distill.flower.encoding import encoded_bytes
from flwr_distill.node.events import Answer, Bundle, Header
from flwr_distill.node.guard import Guard
from flwr_distill.node.policy import Policy
from flwr_distill.node.settings import NodeSettings, load_settings
from flwr_distill.node.supervisor import app_config
from flwr_distill.protocol.registry import all_methods
from flwr_distill.protocol.replies import UNKNOWN
from flwr_distill.server.settings_catalogue import settings_tables
from flwr_distill.simulation.grid import Pool
from flwr_distill.simulation.workers import Config


class Guarded:
    """A pool of nodes whose guards judge what another pool gets, and what it answers.

    A node has one message at a time.

    Parameters
    ----------
    pool : Pool
        Answers the messages.
    nodes : Mapping[int, Mapping[str, bool | int | float | str]]
        Node config of each by `config_under`, by Flower's node id.
    policy : Policy
        Of all nodes.
    run_id : int
        Of the run.
    run_config : Mapping[str, bool | int | float | str]
        What the run sets.
    """

    def __init__(
        self,
        pool: Pool,
        nodes: Mapping[int, Config],
        policy: Policy,
        run_id: int,
        run_config: Config,
    ) -> None:
        self._pool = pool
        self._run_id = run_id
        self._app = Bundle("", None, signed=False, overrides=_with_defaults(run_config))
        self._guards = {
            node: Guard(policy, Path(str(config["state-dir"])), config, run_config_of)
            for node, config in nodes.items()
        }
        self._places = {node: place for place, node in enumerate(nodes)}
        self._queues: dict[int, deque[Message]] = {node: deque() for node in nodes}
        """Messages to each node, of which its guard has the first."""
        self._nodes: dict[str, int] = {}
        """Who has the messages that were admitted."""
        self._replies: list[tuple[str, RecordDict | Error]] = []

    def submit(self, messages: Sequence[Message]) -> None:
        """Queue messages."""
        free = []
        for message in messages:
            node = message.metadata.dst_node_id
            if not self._queues[node]:
                free.append(node)
            self._queues[node].append(message)
        self._admit(free)

    def wait(self, seconds: float) -> list[tuple[str, RecordDict | Error]]:
        """Wait for replies; return what leaves of them by message id, as soon as there is one."""
        free = []
        for name, answer in self._pool.wait(0 if self._replies else seconds):
            node = self._nodes.pop(name)
            if isinstance(answer, Error):
                self._release(node, Answer(None, answer.code, answer.reason or ""))
            else:
                self._release(node, Answer(answer))
            free.append(node)
        self._admit(free)
        replies, self._replies = self._replies, []
        return replies

    def _admit(self, nodes: Sequence[int]) -> None:
        """Give the pool the next message of these nodes that their guards admit."""
        admitted = []
        for node in nodes:
            queue, guard = self._queues[node], self._guards[node]
            while queue:
                metadata = queue[0].metadata
                if time.time() > metadata.created_at + metadata.ttl:
                    queue.popleft()
                    self._replies.append((metadata.message_id, Error(UNKNOWN, "it has expired")))
                    continue
                header = Header(metadata.message_id, metadata.message_type, self._run_id, node)
                if (refusal := guard.admit(header, queue[0].content, self._app)) is None:
                    admitted.append(queue[0])
                    self._nodes[metadata.message_id] = node
                    break
                self._release(node, refusal)
        self._pool.submit(admitted)

    def _release(self, node: int, answer: Answer) -> None:
        """Send what the guard of a node releases of the answer to its message."""
        message = self._queues[node].popleft()
        name = message.metadata.message_id
        released = self._guards[node].release(name, answer, _encoded_bytes(answer, message))
        if released.note:
            log(WARNING, "node-%d: %s", self._places[node], released.note)
        if released.content is None:
            self._replies.append((name, Error(released.code, released.reason)))
        else:
            self._replies.append((name, released.content))


def config_under(policy: Policy, node: Config) -> Config:
    """The node config of a real node with a policy, and with these values.

    Raises
    ------
    NodeError
        If no real node has both.
    """
    names = {key: key.replace("-", "_") for key in node}
    settings: dict[str, Any] = {
        name: node[key] for key, name in names.items() if name in NodeSettings.model_fields
    }
    others = {key: node[key] for key, name in names.items() if name not in settings}
    return app_config(load_settings(None, {**settings, "node_config": others, "policy": policy}))


def _with_defaults(run_config: Config) -> dict[str, Any]:
    """All settings of a run, as a bundle of this app has them: those of packages only if named."""
    named = {key.partition(".")[0] for key in run_config}
    defaults = {
        setting.key: setting.default
        for table in settings_tables(all_methods())
        if table.declared or table.name in named
        for setting in table.settings
        if setting.default is not None
    }
    return {**defaults, **run_config}


def _encoded_bytes(answer: Answer, message: Message) -> int:
    content = Error(answer.code, answer.reason) if answer.content is None else answer.content
    return encoded_bytes(Message(content, reply_to=message))
