"""Overrides of Flower 1.32's SuperNode, besides its timing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from flwr.supercore.object_store import object_store_factory

from flwr_distill.flower.app_config import run_config_of
from flwr_distill.flower.line_1_32.node.connection import patch_connection
from flwr_distill.flower.line_1_32.node.steps import Guarding, RunEnds, Spacing, StoppedRuns
from flwr_distill.flower.line_1_32.objects import MemoryObjectStore
from flwr_distill.flower.overrides import WholeMessages, patch_loop
from flwr_distill.node.guard import Guard
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
    """Override the SuperNode; return whether the policy is enforced.

    `refused` gets the SuperLink's reason for not admitting the node.
    """
    patch_connection(lambda: pace, refused)
    object_store_factory.InMemoryObjectStore = MemoryObjectStore  # type: ignore[attr-defined]
    guarding = Guarding(Guard(policy, state_dir, node_config, run_config_of))
    steps = WholeMessages(), Spacing(pace), RunEnds(state_dir), StoppedRuns(), guarding
    return patch_loop(*steps) and guarding.patch_run_config()
