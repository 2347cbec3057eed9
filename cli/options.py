"""Options that several subcommands share."""

from pathlib import Path
from typing import Annotated

import typer

FederationDir = Annotated[
    Path, typer.Option("--state-dir", help="Directory of the local federation: logs, settings.")
]
DEFAULT_FEDERATION_DIR = Path("state/local")
