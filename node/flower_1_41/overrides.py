"""What of Flower 1.41's and 1.42's SuperNode is overridden, besides its timing: nothing so far."""

from __future__ import annotations

from pathlib import Path

from flwr_distill.node.pace import Pace
from flwr_distill.node.policy import Policy
from flwr_distill.node.settings import NodeConfigValue


def override(
    pace: Pace, policy: Policy, state_dir: Path, node_config: dict[str, NodeConfigValue]
) -> bool:
    """Return whether the policy is kept: nothing stands between SuperLink and app."""
    return False
