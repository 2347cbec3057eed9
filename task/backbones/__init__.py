"""Frozen networks with a linear head, as models of a run."""

from task.backbones.frozen import Frozen, fingerprint

__all__ = ["Frozen", "fingerprint"]
