"""`flwr-distill superlink` is Flower's SuperLink."""

import sys
from logging import ERROR, INFO

import pytest
from flwr.common import log
from flwr.common.logger import FLOWER_LOGGER
from flwr.server import app as app_of_flower
from flwr.server.superlink.linkstate import linkstate_factory
from flwr.supercore.object_store import object_store_factory
from flwr.superlink.servicer.serverappio import serverappio_grpc
from typer.testing import CliRunner

import cli.superlink as superlink
from cli.main import app
from fleet.flower_1_32 import linkstate
from fleet.flower_1_32.callers import BoundAdapterServicer, BoundServicer


@pytest.fixture(autouse=True)
def _own_process(monkeypatch):
    """The command is a process of its own, and leaves things changed."""
    for owner, name in (
        (sys, "argv"),
        (linkstate_factory, "SqlLinkState"),
        (linkstate_factory, "InMemoryLinkState"),
        (object_store_factory, "SqlObjectStore"),
        (app_of_flower, "FleetServicer"),
        (app_of_flower, "GrpcAdapterServicer"),
        (app_of_flower, "generic_create_grpc_server"),
        (serverappio_grpc, "generic_create_grpc_server"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    level, filters = FLOWER_LOGGER.level, FLOWER_LOGGER.filters[:]
    switch = sys.getswitchinterval()
    yield
    sys.setswitchinterval(switch)
    FLOWER_LOGGER.setLevel(level)
    FLOWER_LOGGER.filters = filters


def test_its_help_is_flowers():
    done = CliRunner().invoke(app, ["superlink", "--help"])
    assert done.exit_code == 0
    assert done.output.startswith("usage: flower-superlink")
    assert "--fleet-api-address" in done.output


def test_flower_refuses_what_flower_does_not_know():
    done = CliRunner().invoke(app, ["superlink", "--no-such-option"])
    assert done.exit_code == 2


def test_with_another_flower_it_becomes_flowers_command_and_says_what_is_missing(monkeypatch):
    became = []
    monkeypatch.setattr(superlink, "why_another", lambda: "flwr 1.41.0 is installed")
    monkeypatch.setattr(superlink.os, "execvp", lambda *command: became.append(command) or exit())
    said = CliRunner().invoke(app, ["superlink", "--insecure"]).stderr
    assert "flwr 1.41.0 is installed" in said
    assert "any registered node can reply for another" in said
    assert became == [("flower-superlink", ["flower-superlink", "--insecure"])]


def test_both_apis_are_served_with_ours(monkeypatch):
    monkeypatch.setattr(app_of_flower, "run_superlink", lambda: None)
    linkstate.main()
    for module in (app_of_flower, serverappio_grpc):
        assert module.generic_create_grpc_server.func is linkstate._server
    assert app_of_flower.FleetServicer is BoundServicer
    assert app_of_flower.GrpcAdapterServicer is BoundAdapterServicer
    assert linkstate_factory.InMemoryLinkState is linkstate.MemoryLinkState
    assert linkstate_factory.SqlLinkState is linkstate.RememberingLinkState


def test_a_line_for_each_call_is_not_written_and_others_are(monkeypatch, caplog):
    monkeypatch.setattr(app_of_flower, "run_superlink", lambda: None)
    linkstate.main()
    log(INFO, "[Fleet.PullMessages] node_id=%s", 1)
    log(INFO, "[Fleet.ActivateNode] Activated node_id=%s", 1)
    log(ERROR, "[Fleet.PushMessages] failed")
    assert [record.getMessage() for record in caplog.records] == [
        "[Fleet.ActivateNode] Activated node_id=1",
        "[Fleet.PushMessages] failed",
    ]
