"""Other names of `node.kernel`'s functions."""

from flwr_distill.node.kernel import keep_freed
from flwr_distill.node.kernel import trim_heap as give_freed_back

__all__ = ["give_freed_back", "keep_freed"]
