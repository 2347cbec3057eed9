"""Flower 1.32's own SuperLink in this process and without a network; nodes are functions."""

from contextlib import nullcontext
from types import SimpleNamespace

from flwr.app import Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.serverappio_pb2_grpc import add_ServerAppIoServicer_to_server
from flwr.server.superlink.fleet.message_handler import message_handler as fleet
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, NOOP_FEDERATION, TaskType
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.grid import GrpcGrid
from flwr.superlink.servicer.serverappio import serverappio_servicer as serverappio

from flwr_distill.flower.line_1_32.calls import MAX_CALLS, unpacked
from flwr_distill.flower.line_1_32.fleet.calls import BatchedCalls


class SuperLink:
    """A SuperLink with nodes that answer when the ServerApp looks for replies.

    ``nodes[i](message)`` returns the content of node i's reply, or an Error; or None: the node
    received the message and is silent. A node that is None does not fetch its messages.
    ``sends[i]`` is how many objects of its reply node i sends before it dies, of ``parts[i]``;
    ``lost_parts`` are those that get lost of every reply; ``forge`` changes what the objects say
    of the reply, not what the SuperLink is told. ``together`` is whether it takes calls together,
    as ours does.
    """

    def __init__(self, monkeypatch, nodes, together):
        objects = ObjectStoreFactory()
        links = LinkStateFactory(FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), objects)
        self.state, self.store = links.state(), objects.store()
        self.ids = [self.state.create_node("", "", bytes([i]), 0) for i in range(len(nodes))]
        for node in self.ids:
            self.state.activate_node(node, 1000.0)
        run_id = self.state.create_run(
            None, None, None, {}, NOOP_FEDERATION, None, None, TaskType.SERVER_APP
        )
        run = self.state.get_run_info(run_ids=[run_id])[0]
        self.state.claim_task(run.primary_task_id)
        self.state.activate_task(run.primary_task_id)
        monkeypatch.setattr(
            serverappio, "_get_authenticated_serverapp_run_id", lambda context: run_id
        )
        servicer = serverappio.ServerAppIoServicer(links, objects)
        self.nodes = dict(zip(self.ids, nodes, strict=True))
        self.sends, self.parts, self.pushed, self.calls = {}, {}, {}, []
        self.lost_parts, self.forge = set(), lambda metadata: None
        stub = SimpleNamespace(
            **{name: self._counted(getattr(servicer, name), name) for name in CALLS}
        )
        self.grid = GrpcGrid(token="none")
        self.grid._channel, self.grid._grpc_stub = Channel(servicer, together), stub
        self.grid.set_run(run)

    def _counted(self, call, name):
        def counted(request):
            self.calls.append(name)
            if name == "PullMessages":
                self.work()
            return call(request, None)

        return counted

    def work(self):
        """Have each node fetch its messages and reply."""
        for node, answer in self.nodes.items():
            if answer is None:
                continue
            request = PullMessagesRequest(node=Node(node_id=node))
            while (found := fleet.pull_messages(request, self.state, self.store)).messages_list:
                message = self._received(node, found.message_object_trees[0])
                if (content := answer(message)) is not None:
                    reply = Message(RecordDict(), reply_to=message)
                    if isinstance(content, Error):
                        reply = Message(content, reply_to=message)
                    else:
                        reply.__dict__["_content"] = content  # unchecked
                    self.reply(node, reply)

    def _received(self, node, tree):
        parts = [part.object_id for part in iterate_object_tree(tree)]
        message = inflate_object_from_contents(
            tree.object_id, {part: self.store.get(part) for part in parts}
        )
        self._confirm(node, tree.object_id)
        message.metadata.__dict__["_message_id"] = tree.object_id
        return message

    def _confirm(self, node, object_id):
        request = ConfirmMessageReceivedRequest(
            node=Node(node_id=node), run_id=self.grid.run.run_id, message_object_id=object_id
        )
        fleet.confirm_message_received(request, self.state, self.store)

    def reply(self, node, reply):
        """Announce a reply and send its objects, as many of them as ``sends`` says."""
        told = message_to_proto(remove_content_from_message(reply))
        self.forge(reply.metadata)
        told.metadata.message_id = reply.object_id
        request = PushMessagesRequest(
            node=Node(node_id=node),
            messages_list=[told],
            message_object_trees=[get_object_tree(reply)],
        )
        wanted = fleet.push_messages(request, self.state, self.store).objects_to_push
        objects = [(i, o) for i, o in get_all_nested_objects(reply).items() if i in wanted]
        self.parts[node] = len(objects)
        objects = [each for i, each in enumerate(objects) if i not in self.lost_parts]
        self.pushed[node] = iter(objects)
        self.push(node, self.sends.get(node, len(objects)))

    def push(self, node, count):
        """Send so many more objects of a reply."""
        for _ in range(count):
            object_id, part = next(self.pushed[node])
            request = PushObjectRequest(
                node=Node(node_id=node),
                run_id=self.grid.run.run_id,
                object_id=object_id,
                object_content=part.deflate(),
            )
            fleet.push_object(request, self.state, self.store)


class Channel:
    """A channel to Flower's own SuperLink, or ours.

    Attributes
    ----------
    calls : list[int]
        How many went together in each call.
    """

    def __init__(self, servicer, together):
        self.calls = []
        self._servicer = servicer
        self._ours = BatchedCalls(servicer, add_ServerAppIoServicer_to_server, nullcontext)
        self._together = together

    def unary_unary(self, path, request_serializer, response_deserializer):
        def call(request, metadata, timeout):
            details = SimpleNamespace(method=path, invocation_metadata=metadata)
            handler = self._ours.intercept_service(lambda details: None, details)
            if not self._together:
                answer = getattr(self._servicer, path.rpartition("/")[2])(request, None)
                return response_deserializer(answer.SerializeToString())
            if path.endswith("PushObject"):
                self.calls.append(len(unpacked(request.object_content, 2 * MAX_CALLS)) // 2)
            sent = handler.request_deserializer(request_serializer(request))
            return response_deserializer(
                handler.response_serializer(handler.unary_unary(sent, None))
            )

        return call


CALLS = (
    "GetNodes",
    "PushMessages",
    "PushObject",
    "PullMessages",
    "PullObject",
    "ConfirmMessageReceived",
)
