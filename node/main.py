"""Runs a node from a file of settings: `flwr-distill node --config FILE` without its options."""

import sys
from pathlib import Path

from flwr_distill.node.settings import NodeError, load_settings
from flwr_distill.node.supervisor import Node


def main() -> None:
    """Run a node; the argument is its YAML file."""
    try:
        Node(load_settings(Path(sys.argv[1]), {})).run()
    except NodeError as error:
        sys.exit(f"flwr-distill node: {error}")


if __name__ == "__main__":
    main()
