"""Announced objects of messages: each message has its own, and says nothing about another's.

The sender of a message announces the tree of its objects first. An announcement is untrusted. An
object that is in it twice, once with parts and once without, makes a tree of exponential size out
of a short one. It can also name objects of others, whose ids are hashes of public content, with
false parts. Flower's stores believe the first announcement. Here a tree belongs to its message. The
receiver pulls what the tree lists, and takes an object's parts from its content, whose hash is its
id.
"""

# ruff: noqa: D102 (Flower's methods)

from dataclasses import dataclass

from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import is_valid_sha256_hash, iterate_object_tree
from flwr.supercore.object_store import NoObjectInStoreError
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore, ObjectEntry

NOBODY = 0
"""Node id of messages from a ServerApp or an unknown sender."""


def children_in(tree: ObjectTree) -> dict[str, set[str]]:
    """Children of each object in a tree; children come before their parents.

    Raises ValueError if an id is not a hash, or an object has a child twice, or different children.
    """
    children: dict[str, set[str]] = {}
    for part in iterate_object_tree(tree):
        if not is_valid_sha256_hash(part.object_id):
            raise ValueError(f"Invalid object ID format: {part.object_id}")
        announced = {child.object_id for child in part.children}
        if len(announced) != len(part.children):
            raise ValueError(f"Object {part.object_id} has duplicate children.")
        if children.setdefault(part.object_id, announced) != announced:
            raise ValueError(f"Object {part.object_id} has different children.")
    return children


@dataclass
class _Announced:
    run_id: int
    tree: ObjectTree
    node_id: int = NOBODY


class MemoryObjectStore(InMemoryObjectStore):
    """Flower's store of objects in memory, in which each message has its own objects."""

    def __init__(self, verify: bool = True) -> None:
        super().__init__(verify)
        self._messages: dict[str, _Announced] = {}
        self._messages_of: dict[str, set[str]] = {}
        """Messages that have an object."""

    def preregister(self, run_id: int, object_tree: ObjectTree) -> list[str]:
        """Register a message's objects; return those whose content is missing.

        Raises ValueError as `children_in`, or if the message is registered with another tree.
        """
        message, children = object_tree.object_id, children_in(object_tree)
        with self.lock_store:
            if (known := self._messages.get(message)) is None:
                self._messages[message] = _Announced(run_id, object_tree)
                self.run_objects_mapping.setdefault(run_id, set()).add(message)
                for name in children:
                    self.store.setdefault(name, ObjectEntry(b"", False, [], 0, set()))
                    self._messages_of.setdefault(name, set()).add(message)
            elif children_in(known.tree) != children:
                raise ValueError(f"Object {message} was preregistered with different children.")
            return [name for name in children if not self.store[name].is_available]

    def assign(self, message: str, node_id: int) -> None:
        """Note which node announced a message."""
        with self.lock_store:
            if known := self._messages.get(message):  # its run may have ended
                known.node_id = node_id

    def announcer(self, message: str) -> int | None:
        """Node that announced a message; `NOBODY` if no node did, None if it is missing."""
        with self.lock_store:
            known = self._messages.get(message)
            return known.node_id if known else None

    def is_announced(self, object_id: str, node_id: int) -> bool:
        """Whether an object is part of a message that a node announced."""
        with self.lock_store:
            messages = self._messages_of.get(object_id, ())
            return any(self._messages[each].node_id == node_id for each in messages)

    def get_object_tree(self, object_id: str) -> ObjectTree:
        with self.lock_store:
            if (known := self._messages.get(object_id)) is None:
                raise NoObjectInStoreError(f"Object {object_id} was not pre-registered.")
            return known.tree

    def delete(self, object_id: str) -> None:
        """Delete a message, and the objects that no other message has."""
        with self.lock_store:
            if (known := self._messages.pop(object_id, None)) is None:
                return
            if messages := self.run_objects_mapping.get(known.run_id):
                messages.discard(object_id)
            for name in children_in(known.tree):
                self._messages_of[name].discard(object_id)
                if not self._messages_of[name]:
                    del self._messages_of[name], self.store[name]

    def delete_objects_in_run(self, run_id: int) -> None:
        with self.lock_store:
            for message in self.run_objects_mapping.pop(run_id, set()):
                self.delete(message)

    def clear(self) -> None:
        with self.lock_store:
            super().clear()
            self._messages.clear()
            self._messages_of.clear()
