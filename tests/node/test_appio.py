"""The connection from a node's worker to its SuperNode."""

import threading
from concurrent.futures import ThreadPoolExecutor

import flwr.proto.appio_pb2 as messages
import grpc
from flwr.proto.clientappio_pb2_grpc import (
    ClientAppIoServicer,
    add_ClientAppIoServicer_to_server,
)

from flwr_distill.fleet.local_federation import free_ports
from flwr_distill.flower.line_1_32.node.appio import AppIo, pull_task_input


class SuperNode(ClientAppIoServicer):
    def PullTaskInput(self, request, context):  # noqa: N802 (Flower's name)
        response = messages.PullTaskInputResponse()
        response.run.run_id = 7
        return response


def test_a_workers_first_call_waits_until_its_supernode_can_be_reached():
    (port,) = free_ports(1)
    server = grpc.server(ThreadPoolExecutor(1))
    add_ClientAppIoServicer_to_server(SuperNode(), server)

    def start():
        server.add_insecure_port(f"127.0.0.1:{port}")
        server.start()

    later = threading.Timer(1.0, start)
    later.start()
    try:
        task = pull_task_input(AppIo(f"127.0.0.1:{port}", None).calls("token"))
        assert task.run.run_id == 7
    finally:
        later.join()
        server.stop(None)
