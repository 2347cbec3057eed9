"""`flwr-distill superlink` is Flower's SuperLink."""

import sys

import pytest
from flwr.common.logger import FLOWER_LOGGER
from flwr.server import app as app_of_flower
from flwr.server.superlink.linkstate import linkstate_factory
from flwr.supercore.object_store import object_store_factory
from flwr.superlink.servicer.serverappio import serverappio_grpc
from typer.testing import CliRunner

import cli.superlink as superlink
from cli.main import app


@pytest.fixture(autouse=True)
def _own_process(monkeypatch):
    """The command is a process of its own, and leaves things changed."""
    for owner, name in (
        (sys, "argv"),
        (linkstate_factory, "SqlLinkState"),
        (object_store_factory, "SqlObjectStore"),
        (app_of_flower, "generic_create_grpc_server"),
        (serverappio_grpc, "generic_create_grpc_server"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    level, filters = FLOWER_LOGGER.level, FLOWER_LOGGER.filters[:]
    yield
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


def test_with_another_flower_it_becomes_flowers_command(monkeypatch):
    became = []
    monkeypatch.setattr(superlink, "why_another", lambda: "flwr 1.41.0 is installed")
    monkeypatch.setattr(superlink.os, "execvp", lambda *command: became.append(command) or exit())
    CliRunner().invoke(app, ["superlink", "--insecure"])
    assert became == [("flower-superlink", ["flower-superlink", "--insecure"])]
