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

import flwr_distill.cli.superlink as superlink
from flwr_distill.cli.main import app
from flwr_distill.flower.line_1_32.fleet import linkstate
from flwr_distill.flower.line_1_32.fleet.calls import BoundServicer

from .commands import assert_refused


@pytest.fixture(autouse=True)
def _own_process(monkeypatch):
    """The command is a process of its own, and leaves things changed."""
    for owner, name in (
        (sys, "argv"),
        (linkstate_factory, "SqlLinkState"),
        (linkstate_factory, "InMemoryLinkState"),
        (object_store_factory, "SqlObjectStore"),
        (object_store_factory, "InMemoryObjectStore"),
        (app_of_flower, "FleetServicer"),
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


def test_with_another_flower_it_is_flowers_own_and_says_what_that_does_not_do(monkeypatch):
    monkeypatch.setattr(superlink, "is_another", lambda: True)
    started = []
    monkeypatch.setattr("os.execv", lambda program, words: started.append((program, words)))
    monkeypatch.setattr(linkstate, "main", lambda: None)
    done = CliRunner().invoke(app, ["superlink", "--insecure"])
    ((program, words),) = started
    assert program.endswith("/flower-superlink")
    assert words == [program, "--insecure"]
    assert "can reply to it" in done.output


@pytest.mark.parametrize("kind", ["rest", "grpc-adapter"])
def test_an_api_whose_calls_carry_no_key_is_refused(kind, monkeypatch):
    monkeypatch.setattr(app_of_flower, "run_superlink", lambda: None)
    assert_refused(
        CliRunner().invoke(app, ["superlink", "--insecure", "--fleet-api-type", kind]),
        f"--fleet-api-type {kind}",
    )


def test_a_port_that_does_not_exist_is_refused():
    where = ("--fleet-api-address", "127.0.0.1:99999")
    assert_refused(CliRunner().invoke(app, ["superlink", "--insecure", *where]), *where)


def test_the_api_whose_calls_carry_keys_is_served(monkeypatch):
    monkeypatch.setattr(app_of_flower, "run_superlink", lambda: None)
    for arguments in ([], ["--fleet-api-type", "grpc-rere"]):
        assert CliRunner().invoke(app, ["superlink", "--insecure", *arguments]).exit_code == 0


def test_both_apis_are_served_with_ours(monkeypatch):
    monkeypatch.setattr(app_of_flower, "run_superlink", lambda: None)
    linkstate.main()
    for module in (app_of_flower, serverappio_grpc):
        assert module.generic_create_grpc_server.func is linkstate._server
    assert app_of_flower.FleetServicer is BoundServicer
    assert linkstate_factory.InMemoryLinkState is linkstate.MemoryLinkState
    assert linkstate_factory.SqlLinkState is linkstate.CachingLinkState


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
