"""Announced objects of messages: each is said to have the same parts wherever it is.

Announcements are untrusted. An object that is in it twice, once with its parts and
once without, makes trees of exponential size out of a short one.
"""

from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import is_valid_sha256_hash, iterate_object_tree
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore


def children_in(tree: ObjectTree) -> dict[str, set[str]]:
    """Children of each object in a tree; children come before their parents.

    Raises
    ------
    ValueError
        If an id is not a hash, or an object has a child twice, or different children.
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


class MemoryObjectStore(InMemoryObjectStore):
    """Flower's store of objects in memory, which keeps to what its store in SQLite refuses."""

    def preregister(self, run_id: int, object_tree: ObjectTree) -> list[str]:
        """Register a tree's objects; return those whose content is not here.

        Raises
        ------
        ValueError
            As `children_in`, or if one is registered with different children.
        """
        children = children_in(object_tree)
        with self.lock_store:
            for name, announced in children.items():
                if (known := self.store.get(name)) and set(known.child_object_ids) != announced:
                    raise ValueError(f"Object {name} was preregistered with different children.")
            return super().preregister(run_id, object_tree)
