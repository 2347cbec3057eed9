"""Files that a node keeps for a run, so that a restarted process or run goes on where it was."""

import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

CONTINUES = "continues"
"""Blob that names the run, and the node's id in it, from which a run goes on."""

KEPT_ROUNDS = 2
"""Rounds of which a blob is kept: a server that died may not have got what the last one made."""


@dataclass(frozen=True)
class NodeStore:
    """Named blobs in a node's state directory.

    A blob that changes from round to round is written with the store of that round (`at`). Then the
    one of the round before stays too, and a run that is resumed after a round takes up what was
    there at its end.

    Parameters
    ----------
    folder : Path
        Folder of this node and run; made when something is first written.
    round : int, optional (default: None)
        Round that blobs are written in; None for those that are of no round.
    """

    folder: Path
    round: int | None = None

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

    def at(self, server_round: int | None) -> Self:
        """The same store, for blobs of a round, or of none."""
        return replace(self, round=server_round)

    def write(self, name: str, data: bytes) -> None:
        """Keep ``data`` under ``name``: whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=self.folder, prefix=".", delete=False) as file:
            file.write(data)
        if self.round is None:
            os.replace(file.name, self.folder / name)
            return
        os.replace(file.name, self.folder / f"{name}@{self.round:06d}")
        for old in self._rounds(name)[:-KEPT_ROUNDS]:
            old.unlink()

    def read(self, name: str) -> bytes | None:
        """Give what is kept under ``name``, of the last round; None if there is nothing."""
        found = [*self._rounds(name), self.folder / name]
        return next((file.read_bytes() for file in found[-2:] if file.is_file()), None)

    def names(self) -> list[str]:
        """Names of all files, sorted."""
        if not self.folder.is_dir():
            return []
        return sorted(path.name for path in self.folder.iterdir() if path.name[0] != ".")

    def take_over(self, run_id: str, node_id: str, server_round: int) -> int:
        """Take up what a node had kept in another run at the end of a round.

        Parameters
        ----------
        run_id : str
            The run that goes on in this one. Its files stay as they are; those of its links are of
            no use to another run.
        node_id : str
            The node's id in it.
        server_round : int
            Blobs of later rounds are left.

        Returns
        -------
        int
            Blobs taken.
        """
        other, plain = NodeStore(self.folder.parent.parent / run_id / node_id), self.at(None)
        taken = 0
        for name in other.names():
            _, _, written = name.partition("@")
            if (other.folder / name).is_file() and int(written or 0) <= server_round:
                plain.write(name, (other.folder / name).read_bytes())
                taken += 1
        plain.write(CONTINUES, f"{run_id}/{node_id}".encode())
        return taken

    @property
    def origin(self) -> "NodeStore":
        """Store of the run that this one goes on from, and so on back to the first of them.

        What must hold for all of them together, whichever was resumed from where, is kept there.
        """
        before = self.read(CONTINUES)
        if before is None:
            return self.at(None)
        return NodeStore(self.folder.parent.parent / before.decode()).origin

    def _rounds(self, name: str) -> list[Path]:
        return sorted(self.folder.glob(f"{name}@*"))


def _temporary_root() -> Path:
    return Path(tempfile.gettempdir()) / f"flwr-distill-{os.getuid()}"
