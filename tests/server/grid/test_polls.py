"""The polls of many nodes are spaced, those of a few are not, and no ClientApp trips over it."""

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from flwr_distill.client.app import app
from flwr_distill.client.session import Session
from flwr_distill.flower.line_1_32.server.exchange import FEW, space_polls
from flwr_distill.protocol.messages import CLIPPING_NORM, PACE, POLL_EVERY
from flwr_distill.server.grid.exchange import exchange_over
from flwr_distill.task.models import create_model
from tests.grids import plain_grid


def messages_to(nodes, **records):
    records = records or {"config": ConfigRecord()}
    return [Message(RecordDict(dict(records)), node, "train") for node in nodes]


@pytest.mark.parametrize(("count", "apart"), [(2, None), (5, None), (20, 0.2), (300, 3.0)])
def test_nodes_of_a_phase_look_a_hundred_times_a_second_in_all(count, apart):
    messages = messages_to(range(1, count + 1))
    space_polls(messages)
    told = {message.content.get(PACE, {}).get(POLL_EVERY) for message in messages}
    assert told == {apart}


def test_nodes_learn_it_from_the_message_and_its_bytes_are_counted(superlink):
    seen = []

    def answer(message):
        seen.append(message.content[PACE][POLL_EVERY])
        return RecordDict()

    link = superlink(*[answer] * 10)
    grid = plain_grid(link.grid, deadline=10)
    grid.send_and_receive(messages_to(link.ids))
    assert seen == [0.1] * 10
    assert grid.ledger.server_bytes == 10 * (len(POLL_EVERY) + 8)


@pytest.mark.parametrize("told", [{}, {CLIPPING_NORM: 1.0}])
def test_the_client_app_trains_as_if_the_server_had_not_spaced_looks(superlink, tmp_path, told):
    config = {"partition-id": 0, "num-partitions": 40, "state-dir": str(tmp_path), "device": "cpu"}
    context = Context(1, 1, config, RecordDict(), {"train.local-epochs": 1})
    model = create_model("auto", Session.of(context).data.spec, seed=0)
    spaced = []

    def trains(message):
        spaced.append(PACE in message.content)
        return app(message, context).content

    link = superlink(trains, *[lambda message: RecordDict()] * FEW)
    messages = messages_to(
        link.ids, arrays=ArrayRecord(model.state_dict()), config=ConfigRecord(told)
    )
    replies = plain_grid(link.grid, deadline=60).send_and_receive(messages)
    assert spaced == [True]
    assert [reply.error.reason for reply in replies if reply.has_error()] == []
    assert len(replies) == FEW + 1


def test_a_simulation_starts_its_nodes_itself(memory_grid):
    messages = messages_to(range(10))
    exchange_over(memory_grid({})).prepare(messages)
    assert all(PACE not in message.content for message in messages)
