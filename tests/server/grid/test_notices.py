"""What the server says of a node travels with the next message to it, once."""

from flwr.app import ConfigRecord

from flwr_distill.protocol.meeting import MAX_REASONS
from tests.grids import messages_to, plain_grid


def test_each_text_goes_to_its_node_alone_once_and_leaves_messages_as_they_were(memory_grid):
    seen = []

    def note(message):
        record = message.content.config_records.get("notice", ConfigRecord())
        seen.append((message.metadata.dst_node_id, list(record.get("texts", []))))
        return message.content

    grid = plain_grid(memory_grid({1: note, 2: note}), 5)
    notices = grid.transport.notices
    notices.add({1: ["a name twice"]})
    messages = messages_to([1, 2])
    grid.send_and_receive(messages)
    assert sorted(seen) == [(1, ["a name twice"]), (2, [])]
    assert "notice" not in messages[0].content
    seen.clear()
    notices.add({1: ["a name twice"], 2: [str(i) for i in range(2 * MAX_REASONS)]})
    grid.send_and_receive(messages_to([1, 2]))
    assert sorted(seen) == [(1, []), (2, [str(i) for i in range(MAX_REASONS)])]
