"""Runs a node's mailbox (`links.mailbox`) as a process beside SuperNode and executor."""

from __future__ import annotations

import sys
import tomllib
from logging import INFO, WARNING
from pathlib import Path

from flwr.common import log

from flwr_distill.links.errors import LinkError
from flwr_distill.links.folder import remove_expired
from flwr_distill.links.mailbox import EXPIRY, Mailbox, start_server
from flwr_distill.node import log_lines
from flwr_distill.node.notes import Notes, shortened

_SWEEP = 60.0


def main() -> None:
    """Run the mailbox; arguments: the report's file descriptor, and the node config file."""
    log_lines.begin("mailbox")
    report = Notes.of(int(sys.argv[1]))
    node_config = tomllib.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    state_dir, address = Path(node_config["state-dir"]), node_config["peer-address"]
    try:
        server, _ = start_server(Mailbox(state_dir), address, node_config)
    except LinkError as error:
        report.send("unfit", shortened(str(error)))
        return
    log(INFO, "Mailbox: listening at %s", address)
    if "peer-certificate" not in node_config:
        log(WARNING, "Mailbox: no TLS, so only for nodes on this machine; parcels are sealed")
    while server.wait_for_termination(_SWEEP):
        remove_expired(state_dir, EXPIRY)


if __name__ == "__main__":
    main()
