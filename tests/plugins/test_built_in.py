"""A method of ours is one new folder, and no other file is touched."""

import sys

import pytest

import flwr_distill.strategies
from flwr_distill.protocol.registry import all_methods, built_in_methods
from flwr_distill.server.settings import RunSettings
from flwr_distill.task.errors import SettingsError

DECLARATION = '''
"""Nudge: its setting, phase, loss term and declaration."""

from typing import Annotated

from pydantic import Field

from flwr_distill.protocol.method import Method, Phase, all_protected
from flwr_distill.protocol.schema import Count, Reply
from flwr_distill.task.settings import Block

COUNT = "query.count"
NUDGE = "nudge"
CLIENT = "flwr_distill.strategies.nudge.client"


class NudgeSettings(Block):
    """Settings of nudge (``nudge.*``)."""

    weight: Annotated[float, Field(ge=0)] = 0.5


class CountMetrics(Block):
    samples: Count


METHODS = (
    Method(
        name="nudge",
        strategy="flwr_distill.strategies.nudge.strategy:Nudge",
        settings=NudgeSettings,
        phases=(Phase(COUNT, "nodes count", (Reply(metrics=CountMetrics),), f"{CLIENT}:count"),),
        terms={NUDGE: f"{CLIENT}:Term"},
        unprotected=all_protected,
    ),
)
'''

STRATEGY = '''
"""Nudge at the server."""

from flwr.app import ConfigRecord, Message, RecordDict

from flwr_distill.strategies.common.checked import CheckedFedAvg
from flwr_distill.strategies.nudge.method import COUNT, NUDGE, NudgeSettings


class Nudge(CheckedFedAvg):
    """FedAvg whose nodes shrink their weights, by the federation's number of samples."""

    settings: NudgeSettings = NudgeSettings()

    def configure_train(self, server_round, arrays, config, grid):
        nodes = list(grid.get_node_ids())
        replies = grid.send_and_receive([Message(RecordDict(), node, COUNT) for node in nodes])
        self.samples = sum(reply.content["metrics"]["samples"] for reply in replies)
        return super().configure_train(server_round, arrays, config, grid)

    def records(self):
        return {NUDGE: ConfigRecord({"weight": self.settings.weight, "samples": self.samples})}
'''

CLIENT = '''
"""Nudge on nodes."""

from flwr.app import Message, MetricRecord, RecordDict

from flwr_distill.client.session import Session
from flwr_distill.client.terms import LossTerm
from flwr_distill.strategies.nudge.method import NUDGE

NUDGES = []


def count(message, context):
    samples = len(Session.of(context).data.train)
    return Message(RecordDict({"metrics": MetricRecord({"samples": samples})}), reply_to=message)


class Term(LossTerm):
    """Weight decay that is told by the server."""

    mixes = "weights"

    def __init__(self, model, nudge):
        self.model, self.nudge = model, nudge

    @classmethod
    def of(cls, session, content, model, settings):
        NUDGES.append(dict(content.config_records[NUDGE]))
        return cls(model, NUDGES[-1]["weight"])

    def __call__(self, inputs, labels, logits):
        return self.nudge * sum(p.square().sum() for p in self.model.parameters())
'''


@pytest.fixture
def nudge(tmp_path, monkeypatch):
    """The folder, as if it lay in `strategies`."""
    folder = tmp_path / "nudge"
    folder.mkdir()
    files = {"__init__": "", "method": DECLARATION, "strategy": STRATEGY, "client": CLIENT}
    for name, source in files.items():
        (folder / f"{name}.py").write_text(source)
    path = [*flwr_distill.strategies.__path__, str(tmp_path)]
    monkeypatch.setattr(flwr_distill.strategies, "__path__", path)
    built_in_methods.cache_clear()
    all_methods.cache_clear()
    yield
    for name in [name for name in sys.modules if "strategies.nudge" in name]:
        del sys.modules[name]
    vars(flwr_distill.strategies).pop("nudge", None)
    monkeypatch.undo()
    built_in_methods.cache_clear()
    all_methods.cache_clear()


def test_its_setting_phase_handler_and_loss_term_take_part(nudge, run, sent):
    folder = run(strategy="nudge", num_rounds=1, nudge__weight=0.25)
    from flwr_distill.strategies.nudge.client import NUDGES

    samples = sum(reply["samples"] for reply in NUDGES) // len(NUDGES)
    assert [{"weight": 0.25, "samples": samples}] * 3 == NUDGES
    assert len(sent("query.count")) == 3
    assert "nodes count" in (folder / "report.html").read_text()


def test_its_settings_are_checked_by_name(nudge):
    with pytest.raises(SettingsError, match=r"nudge\.weight = -1"):
        RunSettings.from_run_config({"nudge.weight": -1.0})
