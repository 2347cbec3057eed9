"""What a site should know of its node, which only the server sees."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from flwr.app import ConfigRecord, Message, RecordDict

from flwr_distill.protocol.meeting import MAX_REASONS, Notice
from flwr_distill.protocol.messages import NOTICE


@dataclass
class Notices:
    """Texts that travel to nodes with the next message to each, for their logs; each text once."""

    _known: dict[int, set[str]] = field(default_factory=dict)
    _new: dict[int, list[str]] = field(default_factory=dict)

    def add(self, texts: Mapping[int, Sequence[str]]) -> None:
        """Add texts by node."""
        for node, own in texts.items():
            known = self._known.setdefault(node, set())
            if new := [text for text in own if text not in known]:
                known.update(new)
                self._new[node] = [*self._new.get(node, ()), *new]

    @contextmanager
    def attached(self, messages: Sequence[Message]) -> Iterator[None]:
        """Have messages carry the texts for their nodes within the block, which pushes them."""
        plain: list[tuple[Message, RecordDict]] = []
        for message in messages:
            if texts := self._new.pop(message.metadata.dst_node_id, None):
                plain.append((message, message.content))
                notice = ConfigRecord(Notice(texts=texts[:MAX_REASONS]).model_dump(by_alias=True))
                message.content = RecordDict({**message.content, NOTICE: notice})
        try:
            yield
        finally:
            for message, content in plain:
                message.content = content
