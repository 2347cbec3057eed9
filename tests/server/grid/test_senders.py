"""A reply counts if it comes from the node that its message was sent to."""

import time
from types import SimpleNamespace

import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID

from flwr_distill.flower.line_1_32.server.inbox import SuperLinkInbox
from flwr_distill.server.grid import transport
from flwr_distill.server.grid.exchange import Exchange
from flwr_distill.server.grid.inbox import SUPERLINK, Inbox, Most, OneByOneInbox
from flwr_distill.server.record.journal import Journal
from tests.grids import messages_to, plain_grid
from tests.server.run_folder import journal as journal_of

ASKED, LIAR = 2**63 + 7, 2**63 + 8


class Grid:
    """Flower's grid over a SuperLink that checks nothing: the liar's reply first, then the own."""

    def __init__(self, forged):
        self._forged = forged
        self.replies = []

    def push_messages(self, messages):
        for place, message in enumerate(messages):
            message.metadata.__dict__["_message_id"] = str(place)
            own = Message(RecordDict({"told": ConfigRecord({"words": "own"})}), reply_to=message)
            forged = Message(self._forged, reply_to=message)
            forged.metadata.__dict__["_src_node_id"] = LIAR
            self.replies += [forged, own]
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, message_ids):
        replies, self.replies = self.replies[:1], self.replies[1:]
        return replies

    def get_node_ids(self):
        return [ASKED, LIAR]


@pytest.mark.parametrize("inbox", [Inbox, OneByOneInbox])
@pytest.mark.parametrize(
    "forged", [RecordDict({"told": ConfigRecord({"words": "forged"})}), Error(3, "forged")]
)
def test_a_reply_of_another_node_is_rejected_and_the_own_one_accepted(
    inbox, forged, monkeypatch, tmp_path, flower_log
):
    monkeypatch.setattr(transport, "exchange_over", lambda grid: Exchange(grid, inbox))
    with Journal(tmp_path / "journal.jsonl") as journal:
        grid = plain_grid(Grid(forged), deadline=10, journal=journal)
        (reply,) = grid.send_and_receive([Message(RecordDict(), ASKED, "train")])
    assert reply.metadata.src_node_id == ASKED
    assert reply.content["told"]["words"] == "own"
    assert f"{LIAR}" in flower_log.text
    assert f"{ASKED}" in flower_log.text
    (booked,) = journal_of(tmp_path, "set_aside")
    assert booked["set_aside"] == str(ASKED)
    assert str(LIAR) in booked["reason"]
    assert journal.set_aside == 1


@pytest.mark.parametrize("inbox", [Inbox, OneByOneInbox])
def test_content_is_not_taken_from_the_superlink_itself(inbox):
    """It reports lost nodes, and nothing else."""
    assert SUPERLINK == SUPERLINK_NODE_ID
    message = Message(RecordDict(), ASKED, "train")
    opened = inbox(SimpleNamespace(), {"one": message}, lambda message: Most(1, 1))
    assert opened._is_own("one", SUPERLINK, error=True)
    assert not opened._is_own("one", SUPERLINK, error=False)
    assert opened.rejected == [(message, f"node {SUPERLINK} has sent it")]


def words(text):
    return lambda message: RecordDict({"told": ConfigRecord({"words": text})})


@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
def test_what_a_superlink_announces_of_another_node_is_dropped_there(
    superlink, together, monkeypatch
):
    """Flower's SuperLink announces no such reply; one that is broken, or taken over, may."""
    link = superlink(words("first"), words("second"), together=together)
    messages = [messages_to([node])[0] for node in link.ids]
    grid = plain_grid(link.grid, deadline=10)
    sent = dict(zip(grid.push_messages(messages), messages, strict=True))
    inbox = grid.transport._exchange.open_inbox(sent, lambda message: Most(10**6, 100))
    assert isinstance(inbox, SuperLinkInbox)
    pull = link.grid._stub.PullMessages

    def swapped(request):
        response = pull(request)
        for reply in response.messages_list:
            if reply.metadata.src_node_id == link.ids[0]:
                reply.metadata.src_node_id = link.ids[1]
        return response

    monkeypatch.setattr(link.grid._stub, "PullMessages", swapped)
    (reply,) = inbox.fetch(time.monotonic() + 10)
    assert reply.metadata.src_node_id == link.ids[1]
    assert inbox.rejected == [(messages[0], f"node {link.ids[1]} has sent it")]
    assert inbox.waiting == {name for name, message in sent.items() if message is messages[0]}
    assert len(link.store) == 0
