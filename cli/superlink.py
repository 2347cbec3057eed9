"""`flwr-distill superlink` and `register`: Flower's SuperLink, and the nodes that it admits."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import typer

from flwr_distill.base import json_lines
from flwr_distill.cli.connection import (
    ControlAddress,
    Timeout,
    UserCertificate,
    UserKey,
    user_of,
)
from flwr_distill.cli.errors import exit_on, fail
from flwr_distill.cli.options import DEFAULT_CERTIFICATES_DIR, CertificatesDir, LogFormat
from flwr_distill.fleet.authority import CertificateError
from flwr_distill.fleet.certificates import CertificateFolder
from flwr_distill.flower.control import SuperLinkError, open_control
from flwr_distill.node.stock import environment, is_another

STOCK = "flower-superlink"


def superlink(context: typer.Context, log_format: LogFormat = None) -> None:
    """Run Flower's SuperLink, for many nodes: with fewer calls and fewer database queries.

    A node's calls reach only its own messages and replies, which Flower does not check. It takes
    the arguments of `flower-superlink`, except `--fleet-api-type`, and the same database. It also
    takes `--log-format json`. With another Flower than 1.32 it is `flower-superlink`, which does
    none of this, and says so.
    """
    os.environ[json_lines.VARIABLE] = log_format or "text"
    _make_folder_of_database(context.args)
    os.environ.update(environment(os.environ))  # it starts Flower's other programs
    if is_another():
        typer.echo(
            f"flwr {version('flwr')}: this is Flower's own SuperLink. A registered node that knows "
            "the id of another one's message can reply to it. Its log is text. From 1.40 on, "
            "anyone who reaches its port can start runs (docs/flower.md).",
            err=True,
        )
        program = str(Path(sys.executable).with_name(STOCK))
        os.execv(program, [program, *context.args])
    from flwr_distill.flower.line_1_32.fleet.linkstate import main, why_unbound  # imports Flower

    sys.argv = [STOCK, *context.args]
    json_lines.begin("superlink")
    if reason := why_unbound():
        fail(reason, "superlink")
    main()


def _make_folder_of_database(arguments: list[str]) -> None:
    """Make the folder of the ``--database`` file: SQLite's error would not name it."""
    for option, value in pairwise(arguments):
        if option == "--database" and not value.startswith(":"):
            try:
                Path(value).parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                problem = error.strerror or str(error)
                fail(problem, "superlink", where="--database", value=value, remedy="name another")


def register(
    folder: CertificatesDir = DEFAULT_CERTIFICATES_DIR,
    superlink: ControlAddress = "127.0.0.1:9093",
    user_certificate: UserCertificate = None,
    user_key: UserKey = None,
    timeout: Timeout = 60.0,
) -> None:
    """Register the keys of all nodes of a certificates folder with a SuperLink.

    Waits for the SuperLink to answer. Registered nodes stay unchanged, revoked nodes are skipped.
    Writes their keys to nodes.json, with which a ServerApp checks the sender of a reply.
    """
    authority = CertificateFolder(folder)
    user = user_of(user_certificate, user_key, "register")
    with exit_on(CertificateError, SuperLinkError, OSError, command="register"):
        nodes = [each for each in authority.issued() if each.is_node and not each.revoked]
        typer.echo(f"waiting for the SuperLink at {superlink} ...")
        certificate, ids = authority.certificate, authority.noted_ids
        with open_control(superlink, certificate, user, ids) as control:
            control.wait(timeout)
            valid = {node.registered_key for node in nodes}
            known = {key: node_id for key, node_id in ids.items() if key in valid}
            try:
                for node in nodes:
                    node_id, is_new = control.register(node.registered_key)
                    state = "registered" if is_new else "already registered"
                    typer.echo(f"{node.name}: {state}, Flower's node id is {node_id}")
                    known[node.registered_key] = node_id
            finally:  # other Flowers do not say again which id a key has
                authority.note_ids(known)
