"""Which nodes of a checkpoint are back, so that a claim alone does not give a node another's place.

A place belongs to whoever shows what its node showed when the run met it: a signature of the same
certificate's key, or the same secret of a state directory. A node that has lost both is new to the
run.
"""

from collections.abc import Mapping
from logging import WARNING

from flwr.common import log


def returned_nodes(
    places: Mapping[int, str],
    keys: Mapping[int, str],
    claims: Mapping[int, str],
    shown: Mapping[int, str],
) -> dict[int, int]:
    """New id of each node that is back, by its old one.

    `places`: what each node of the checkpoint was known by, such as its partition, in the order in
    which they were met: the last of several with the same is the one that counts. `keys`:
    fingerprints of the keys or secrets that they had shown. `claims`: what the nodes that are
    connected now say that they are known by. `shown`: fingerprints of the keys or secrets that
    these have shown.
    """
    returned = {}
    for name, old in {name: old for old, name in places.items()}.items():
        if claims.get(old) == name and keys.get(old) == shown.get(old):
            returned[old] = old
            continue
        for node, claimed in claims.items():
            if claimed != name or places.get(node, name) != name:
                continue
            if keys.get(old, shown.get(node)) == shown.get(node):
                returned[old] = node
            else:
                text = "Node %d claims the place of %s, but not its key or secret: it is new"
                log(WARNING, text, node, called(name))
    return returned


def called(name: str) -> str:
    """What to call a node that is known by a partition or a name."""
    return f"node-{name}" if name.isdecimal() else name
