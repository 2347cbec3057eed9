"""Overrides of the SuperNode of Flower 1.36, 1.41 and 1.42, besides its timing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from flwr_distill.flower.overrides import WholeMessages, patch_loop
from flwr_distill.node.pace import Pace
from flwr_distill.node.policy import Policy
from flwr_distill.node.settings import NodeConfigValue


def override(
    pace: Pace,
    policy: Policy,
    state_dir: Path,
    node_config: dict[str, NodeConfigValue],
    refused: Callable[[str], None],
) -> bool:
    """Override the SuperNode; return whether the policy is enforced: no guard runs here."""
    patch_loop(WholeMessages())
    return False
