"""What of Flower 1.32's SuperNode is overridden, besides its timing."""

from __future__ import annotations

from pathlib import Path

from flwr.supercore.object_store import object_store_factory

from flwr_distill.node.flower_1_32.guard import Guard, patch_guard
from flwr_distill.node.flower_1_32.retries import patch_retries
from flwr_distill.node.flower_1_32.run_ends import patch_run_ends, patch_stopped_runs
from flwr_distill.node.flower_1_32.spacing import patch_spacing
from flwr_distill.node.flower_1_32.together import patch_calls
from flwr_distill.node.flower_1_32.waiting import patch_waiting
from flwr_distill.node.pace import Pace
from flwr_distill.node.policy import Policy
from flwr_distill.node.settings import NodeConfigValue
from flwr_distill.protocol.flower_1_32.objects import MemoryObjectStore


def override(
    pace: Pace, policy: Policy, state_dir: Path, node_config: dict[str, NodeConfigValue]
) -> bool:
    """Override it; return whether the policy is kept."""
    patch_retries()
    patch_spacing(pace)
    patch_waiting(pace)
    patch_calls()
    patch_run_ends(state_dir)
    patch_stopped_runs()
    object_store_factory.InMemoryObjectStore = MemoryObjectStore  # type: ignore[attr-defined]
    return patch_guard(Guard(policy, state_dir, node_config))
