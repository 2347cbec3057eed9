"""Runs a node from a file of settings: `flwr-distill node --config FILE` without its options."""

import sys
from pathlib import Path

from flwr_distill.node.settings import NodeError, load_settings
from flwr_distill.node.supervisor import Node


def unfit_file(folder: Path) -> Path:
    """The file beside a node's settings that says why it ended, if no restart would help."""
    return folder / "unfit.txt"


def main() -> None:
    """Run a node; the argument is its YAML file."""
    file = Path(sys.argv[1])
    unfit = unfit_file(file.parent)
    unfit.unlink(missing_ok=True)
    try:
        Node(load_settings(file, {})).run()
    except NodeError as error:
        unfit.write_text(str(error), encoding="utf-8")
        sys.exit(f"flwr-distill node: {error}")


if __name__ == "__main__":
    main()
