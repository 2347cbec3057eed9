"""Files that a node keeps for a run, so that a restarted process goes on where it was."""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class NodeStore:
    """Named blobs in a node's state directory.

    Parameters
    ----------
    folder : Path
        Folder of this node and run; made when something is first written.
    """

    folder: Path

    @classmethod
    def open(cls, state_dir: str | Path | None, run_id: int, node_id: int) -> "NodeStore":
        """Store of one node for one run.

        Parameters
        ----------
        state_dir : str or Path, optional
            The node's state directory. If None: the environment's FLWR_DISTILL_STATE, else a
            folder of this user in the system's temporary directory.
        run_id : int
            Flower's run id.
        node_id : int
            Flower's node id.
        """
        root = state_dir or os.environ.get("FLWR_DISTILL_STATE") or _temporary_root()
        return cls(Path(root) / "runs" / str(run_id) / str(node_id))

    def write(self, name: str, data: bytes) -> None:
        """Keep ``data`` under ``name``: whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=self.folder, prefix=".", delete=False) as file:
            file.write(data)
        os.replace(file.name, self.folder / name)

    def names(self) -> list[str]:
        """Names of all blobs, sorted."""
        if not self.folder.is_dir():
            return []
        return sorted(path.name for path in self.folder.iterdir() if path.name[0] != ".")


def _temporary_root() -> Path:
    return Path(tempfile.gettempdir()) / f"flwr-distill-{os.getuid()}"
