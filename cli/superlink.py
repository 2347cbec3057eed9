"""`flwr-distill superlink` and `register`: Flower's SuperLink, and the nodes that it admits."""

from __future__ import annotations

import os
import shutil
import sqlite3
import sys
from contextlib import closing
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import typer

from flwr_distill.base import json_lines
from flwr_distill.cli.connection import RegistrationOptions, with_registration
from flwr_distill.cli.errors import exit_on, fail
from flwr_distill.cli.options import DEFAULT_CERTIFICATES_DIR, CertificatesDir, LogFormat
from flwr_distill.fleet import serverapp
from flwr_distill.fleet.authority import CertificateError
from flwr_distill.fleet.certificates import CertificateFolder
from flwr_distill.fleet.servers import listen_once
from flwr_distill.flower.control import SuperLinkError
from flwr_distill.node.stock import environment, is_another

STOCK = "flower-superlink"
_LOCKED_FOR = 10.0
"""Seconds for which another process may lock the database as the SuperLink starts."""
_LEAST_SPACE = 1 << 20
"""Bytes without which a SuperLink does not start: it could not keep a message."""


def superlink(context: typer.Context, log_format: LogFormat = None) -> None:
    """Run Flower's SuperLink, for many nodes: with fewer calls and fewer database queries.

    A node's calls reach only its own messages and replies, which Flower does not check. It takes
    the arguments of `flower-superlink`, except `--fleet-api-type`, and the same database. It also
    takes `--log-format json`. With another Flower than 1.32 it is `flower-superlink`, which does
    none of this, and says so.
    """
    os.environ[json_lines.VARIABLE] = log_format or "text"
    _check_addresses(context.args)
    _check_database(context.args)
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
    with TemporaryDirectory() as programs:
        serverapp.program(Path(programs))  # reports ServerApps that are killed
        os.environ["PATH"] = os.pathsep.join([programs, os.environ["PATH"]])
        main()


def _check_addresses(arguments: list[str]) -> None:
    """Fail if another process listens at an address: gRPC's error does not name the option."""
    for option, value in pairwise(arguments):
        port = value.rpartition(":")[2]
        if not (option.startswith("--") and option.endswith("-api-address") and port.isdigit()):
            continue
        try:
            listen_once(value)
        except OSError as error:
            remedy = "end what listens there, or name another port"
            problem = os.strerror(error.errno) if error.errno else str(error)
            fail(problem, "superlink", where=option, value=value, remedy=remedy)


def _check_database(arguments: list[str]) -> None:
    """Make the folder of the ``--database`` file, and fail if the file cannot be written.

    Flower's error would name neither file nor option.
    """
    for option, value in pairwise(arguments):
        if option != "--database" or value.startswith(":"):
            continue
        try:
            folder = Path(value).parent
            folder.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(value, timeout=_LOCKED_FOR, isolation_level=None)) as file:
                file.execute("BEGIN IMMEDIATE")
                file.execute("PRAGMA schema_version")
                file.execute("ROLLBACK")
            if (free := shutil.disk_usage(folder).free) < _LEAST_SPACE:
                raise OSError(f"the disk is full: {free} bytes are left")
        except (OSError, sqlite3.Error) as error:
            problem = getattr(error, "strerror", None) or str(error)
            remedy = (
                "free it (space, permissions, other processes), restore a backup, or name another"
            )
            fail(problem, "superlink", where="--database", value=value, remedy=remedy)


@with_registration
def register(
    *,
    folder: CertificatesDir = DEFAULT_CERTIFICATES_DIR,
    options: RegistrationOptions,
) -> None:
    """Register the keys of all nodes of a certificates folder with a SuperLink.

    Waits for the SuperLink to answer. Registered nodes stay unchanged, revoked nodes are skipped.
    Writes their keys to nodes.json, with which a ServerApp checks the sender of a reply.
    """
    authority = CertificateFolder(folder)
    with exit_on(CertificateError, SuperLinkError, OSError, command="register"):
        nodes = [each for each in authority.issued() if each.is_node and not each.revoked]
        typer.echo(f"waiting for the SuperLink at {options.superlink} ...")
        ids: dict[str, int] = {}
        with options.open(authority, "register") as control:
            try:
                for node in nodes:
                    node_id, is_new = control.register(node.login_key)
                    state = "registered" if is_new else "already registered"
                    typer.echo(f"{node.name}: {state}, Flower's node id is {node_id}")
                    ids[node.login_key] = node_id
            finally:  # other Flowers do not say again which id a key has
                authority.note_ids(ids)
