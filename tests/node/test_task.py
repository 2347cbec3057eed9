"""A task of a SuperNode is of one run, whatever the SuperLink says of that run's series."""

import zipfile
from hashlib import sha256
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.common.serde import context_to_proto, fab_to_proto, message_to_proto, run_to_proto
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import get_object_tree
from flwr.supercore.run import Run

from flwr_distill.flower import task as task_module
from flwr_distill.flower.task import Task, Work
from tests.apps import pyproject

OWN, OTHER, NODE = 7, 8, 5


@pytest.fixture
def pulled(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What an executor pulls of run 7, where the SuperNode has the context of another run."""

    def pull(bundle: bytes) -> Work:
        fab = Fab(sha256(bundle).hexdigest(), bundle, {})
        run = Run.create_empty(OWN)
        run.override_config = {"train.lr": 0.5}
        state = RecordDict({"counted": ConfigRecord({"messages": 3})})
        config: Any = {"train.dp-noise": 0.0, "train.lr": 9.0}
        context = Context(OTHER, NODE, {"name": "ward-3"}, state, config)
        message = Message(RecordDict(), NODE, "train")
        message.metadata.__dict__.update(_run_id=OWN, _src_node_id=1, _message_id=message.object_id)
        given = SimpleNamespace(
            context=context_to_proto(context), run=run_to_proto(run), fab=fab_to_proto(fab)
        )
        messages = SimpleNamespace(
            messages_list=[message_to_proto(message)],
            message_object_trees=[get_object_tree(message)],
        )
        monkeypatch.setattr(task_module.appio, "pull_message", lambda calls: messages)
        monkeypatch.setattr(task_module.appio, "pull_task_input", lambda calls: given)
        return Task(SimpleNamespace(calls=lambda token: None), "token").pull()

    return pull


def test_the_app_works_with_the_config_that_the_guard_judges(pulled: Any) -> None:
    """Two runs of one series had one context: the guard judged the first, and the app ran both.

    So a run without noise passed a policy in the name of one with noise.
    """
    content = BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        lines = '"train.dp-noise" = 1.0\n"train.lr" = 0.1\n'
        file.writestr(zipfile.ZipInfo("pyproject.toml"), pyproject("app", lines))
    work = pulled(content.getvalue())
    assert work.context.run_id == OWN
    assert work.context.run_config == {"train.dp-noise": 1.0, "train.lr": 0.5}
    assert dict(work.context.node_config) == {"name": "ward-3"}
    assert work.context.state["counted"]["messages"] == 3


def test_of_a_bundle_that_the_guard_refuses_no_config_is_read(pulled: Any) -> None:
    assert pulled(b"no archive").context.run_config == {}
