"""Secrets of a folder of this machine, which only its user may read."""

from __future__ import annotations

import secrets
from pathlib import Path

from flwr_distill.base.files import replacing

_BYTES = 32


def appio_secret(folder: Path) -> Path:
    """The file of what a process must know that claims tasks of the folder's server or node."""
    return _secret(folder / "appio-secret")


def holdout_secret(folder: Path) -> bytes:
    """What draws the samples that a node holds out, if its policy fixes these; never changes."""
    return _secret(folder / "holdout-secret").read_bytes()


def _secret(file: Path) -> Path:
    if not file.exists() or file.stat().st_size != _BYTES:  # empty after a power cut
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as partial:
            partial.touch(mode=0o600)
            partial.write_bytes(secrets.token_bytes(_BYTES))
    return file
