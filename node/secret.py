"""The secret that whoever claims tasks of a SuperLink or SuperNode on this machine must know."""

from __future__ import annotations

import secrets
from pathlib import Path

from task.durable import replacing

_BYTES = 32


def appio_secret(folder: Path) -> Path:
    """The file of a folder's secret, which only its user may read; made where there is none."""
    file = folder / "appio-secret"
    if not file.exists() or file.stat().st_size != _BYTES:  # empty after a power cut
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(file) as partial:
            partial.touch(mode=0o600)
            partial.write_bytes(secrets.token_bytes(_BYTES))
    return file
