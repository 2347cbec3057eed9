"""Options that several subcommands share."""

from pathlib import Path
from typing import Annotated, Any

import typer

FederationDir = Annotated[
    Path, typer.Option("--state-dir", help="Directory of the local federation: logs, settings.")
]
DEFAULT_FEDERATION_DIR = Path("state/local")

CertificatesDir = Annotated[
    Path, typer.Option("--dir", help="The authority's folder (flwr-distill certs).")
]
DEFAULT_CERTIFICATES_DIR = Path("certs")
DataRoot = Annotated[
    Path | None,
    typer.Option(help="Folder of data sets.", show_default="$FLWR_DISTILL_DATA_ROOT, else data"),
]
NodesDevice = Annotated[
    str | None,
    typer.Option(
        "--device",
        show_default="auto",
        metavar="auto|cpu|cuda|cuda:N",
        help="Where nodes compute: evenly on the GPUs, if any (auto) or required (cuda); all on "
        "one GPU (cuda:N); or on the CPU.",
    ),
]

Method = Annotated[
    str, typer.Option(help="auto, dm, kip, kip-negatives or package.module:function.")
]
PerClass = Annotated[int, typer.Option(min=1, help="Virtual images of each class.")]
FormationSide = Annotated[
    int,
    typer.Option(
        min=0,
        max=4,
        help="Smaller images along each side of a virtual image; 0: the method chooses.",
    ),
]
Steps = Annotated[int | None, typer.Option(min=1, help="Steps.", show_default="the method's own")]
Start = Annotated[str, typer.Option(help="Start images: class-stats, pixel-stats, noise or real.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of every random draw.")]
ImageShape = Annotated[
    str | None,
    typer.Option(
        help="Channels x height x width for the images of a folder, as in 3x32x32.",
        show_default="their own",
    ),
]


def run_config_option(help_text: str) -> Any:
    """Option with settings of a run, as text or as files."""
    return typer.Option("--run-config", "-c", metavar="KEY=VALUE...|FILE.toml", help=help_text)


def node_option(name: str, help_text: str, default: str | bool = False) -> Any:
    """An option that is also an environment variable."""
    variable = "FLWR_DISTILL_" + name.upper().replace("-", "_")
    return typer.Option(f"--{name}", help=help_text, envvar=variable, show_default=default)


NodeConfigFile = Annotated[
    Path | None,
    node_option("config", "YAML file with any of these options; the command line overrides it."),
]
FleetAddress = Annotated[
    str | None, node_option("superlink", "SuperLink's Fleet API, host:port.", "127.0.0.1:9092")
]
Insecure = Annotated[
    bool | None, typer.Option("--insecure", help="No TLS.", envvar="FLWR_DISTILL_INSECURE")
]
RootCertificates = Annotated[
    Path | None,
    node_option("root-certificates", "PEM file of the SuperLink's authority.", "the system's"),
]
AuthKey = Annotated[
    Path | None,
    node_option("auth-key", "Private key of this node, if the SuperLink needs one."),
]
PeerAddress = Annotated[
    str | None,
    node_option("peer-address", "host:port where other nodes can send to this one directly."),
]
PeerAuthority = Annotated[
    Path | None,
    node_option(
        "peer-authority",
        "PEM file of the authority that signs nodes (nodes-ca.crt).",
        "root-certificates",
    ),
]
PeerCertificate = Annotated[
    Path | None,
    node_option("peer-certificate", "PEM file of this node's certificate among its peers."),
]
PeerKey = Annotated[
    Path | None, node_option("peer-key", "PEM file of that certificate's private key.")
]
PeerRevocations = Annotated[
    Path | None,
    node_option("peer-revocations", "PEM file with the revoked nodes (nodes-ca.crl)."),
]
PeerNames = Annotated[
    str | None,
    node_option(
        "peer-names",
        "Nodes to exchange parcels with, as in ward-1,ward-2.",
        "all of the authority's",
    ),
]
Device = Annotated[
    str | None,
    node_option(
        "device",
        "cpu; cuda:N, that GPU; cuda, the GPU with the fewest nodes; auto, like cuda, but the "
        "CPU if there is none.",
        "auto",
    ),
]
StateDir = Annotated[
    Path | None, node_option("state-dir", "Directory of this node's own files.", "state/node")
]
ConnectTimeout = Annotated[
    float | None,
    node_option("connect-timeout", "Seconds to wait for the SuperLink at the start.", "60"),
]
PollBusy = Annotated[
    float | None,
    node_option("poll-busy", "Shortest pause between polls for messages, in seconds.", "0.05"),
]
PollIdle = Annotated[
    float | None,
    node_option("poll-idle", "Longest pause, in seconds, after 17 minutes without work.", "20"),
]
LogLevel = Annotated[str | None, node_option("log-level", "DEBUG, INFO, WARNING or ERROR.", "INFO")]
