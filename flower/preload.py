"""What a node's nursery imports of Flower, once for all parts of the node."""

import flwr.supernode.cli  # noqa: F401
