"""Options that several subcommands share."""

from pathlib import Path
from typing import Annotated

import typer

FederationDir = Annotated[
    Path, typer.Option("--state-dir", help="Directory of the local federation: logs, settings.")
]
DEFAULT_FEDERATION_DIR = Path("state/local")

CertificatesDir = Annotated[
    Path, typer.Option("--dir", help="The authority's folder (flwr-distill certs).")
]
DEFAULT_CERTIFICATES_DIR = Path("certs")
ControlAddress = Annotated[
    str, typer.Option("--superlink", help="SuperLink's Control API, host:port.")
]
Timeout = Annotated[
    float, typer.Option("--timeout", min=0, help="Seconds to wait for the SuperLink.")
]
DataRoot = Annotated[
    Path | None,
    typer.Option(help="Folder of data sets.", show_default="$FLWR_DISTILL_DATA_ROOT, else data"),
]
NodesDevice = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="auto|cpu|cuda|cuda:N",
        help="What nodes compute on: GPUs, spread evenly, if there are any (auto) or in any case "
        "(cuda); all on one GPU (cuda:N); or the CPU.",
    ),
]
