"""What a node's owner has allowed single runs, with `flwr-distill policy allow`."""

from __future__ import annotations

from pathlib import Path

from flwr_distill.base.files import replacing

_FOLDER = "raw-data-allowed"
"""Folder in a state directory, with a file for each run; a sandboxed app cannot write there."""


def allow_raw_data(state_dir: Path, run_id: int) -> None:
    """Let a run have the node's samples unchanged."""
    folder = state_dir / _FOLDER
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with replacing(folder / str(run_id)) as partial:
        partial.touch(mode=0o600)


def raw_data_allowed(state_dir: Path, run_id: int) -> bool:
    """Whether the owner has allowed a run to have samples unchanged."""
    return (state_dir / _FOLDER / str(run_id)).is_file()
