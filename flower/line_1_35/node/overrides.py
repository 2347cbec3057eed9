"""Overrides of a SuperNode from Flower 1.35 on, besides its timing."""

from flwr_distill.flower.overrides import WholeMessages, patch_loop


def override(*_: object) -> bool:
    """Override the SuperNode; return whether the policy is enforced: no guard runs here."""
    patch_loop(WholeMessages())
    return False
