"""A Flower Grid in memory, whose nodes are functions; stands in for a SuperLink in fast tests."""

from itertools import count

import pytest
import torch
from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid

torch.set_num_threads(1)  # tests and the processes they start share few cores


FIRST_NODE = 2**64 - 1000
"""Flower's node ids fill 64 bits: no float, and no signed integer of that size, holds them."""


class MemoryGrid(Grid):
    """Answers each message by calling ``nodes[node_id](message)``.

    A node returns a RecordDict, or raises (an error reply), or returns None (no reply ever).
    Replies are there one a poll, the last first where ``reverse`` is set.
    """

    def __init__(self, nodes):
        self.nodes = nodes
        self.pushed = []
        self._ids = count()
        self._replies = {}
        self.reverse = False

    def set_run(self, run):
        self._run = run

    @property
    def run(self):
        return self._run

    def create_message(self, content, message_type, dst_node_id, group_id, ttl=None):
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self):
        return list(self.nodes)

    def push_messages(self, messages):
        ids = []
        for message in messages:
            message_id = f"message-{next(self._ids)}"
            message.metadata.__dict__["_message_id"] = message_id
            message.metadata.__dict__["_run_id"] = 1
            self.pushed.append(message)
            try:
                answer = self.nodes[message.metadata.dst_node_id](message)
                reply = None if answer is None else Message(answer, reply_to=message)
            except Exception as error:
                reply = Message(Error(0, str(error)), reply_to=message)
            if reply is not None:
                self._replies[message_id] = reply
            ids.append(message_id)
        return ids

    def pull_messages(self, message_ids):
        ready = [i for i in self._replies if i in set(message_ids)]
        if not ready:
            return []
        return [self._replies.pop(ready[-1] if self.reverse else ready[0])]

    def send_and_receive(self, messages, *, timeout=None):
        ids = self.push_messages(messages)
        return [self._replies.pop(i) for i in ids if i in self._replies]


@pytest.fixture
def memory_grid():
    return MemoryGrid


@pytest.fixture
def client_grid(tmp_path):
    """Grid of nodes that run our real ClientApp in this process, on partitions of a dataset."""
    from client.app import app

    run_ids = count(1)

    def grid_of(
        num_nodes,
        run_config,
        broken=lambda node, message: False,
        node_config=None,
        first_node=FIRST_NODE,
        step=1,
    ):
        run_id = next(run_ids)

        def node(index):
            context = Context(
                run_id=run_id,
                node_id=first_node + step * index,
                node_config={
                    "partition-id": index,
                    "num-partitions": num_nodes,
                    "state-dir": str(tmp_path / "state"),
                    "device": "cpu",
                    **(node_config or {}),
                },
                state=RecordDict(),
                run_config=run_config,
            )

            def answer(message):
                if broken(index, message):
                    raise RuntimeError("this node is broken")
                return app(message, context).content

            return answer

        return MemoryGrid({first_node + step * i: node(i) for i in range(num_nodes)})

    return grid_of
