"""Frozen networks with a linear head, as models of a run."""

from flwr_distill.task.backbones.frozen import (
    Frozen,
    copy_to_train,
    fingerprint,
    seen_spec,
    whole_state,
)

__all__ = ["Frozen", "copy_to_train", "fingerprint", "seen_spec", "whole_state"]
