"""Options that several subcommands share."""

import inspect
import shlex
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import yaml

from flwr_distill.base.json_lines import VARIABLE
from flwr_distill.node.settings import load_settings
from flwr_distill.task.text_files import read_text

FederationDir = Annotated[
    Path, typer.Option("--state-dir", help="Directory of the local federation: logs, settings.")
]
DEFAULT_FEDERATION_DIR = Path("state/local")


def state_dir_option(state_dir: Path) -> str:
    """The option for that directory, to append to a command; empty for the default."""
    return (
        "" if state_dir == DEFAULT_FEDERATION_DIR else f" --state-dir {shlex.quote(str(state_dir))}"
    )


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

Seed = Annotated[int, typer.Option(min=0, help="Seed of every random draw.")]
LogFormat = Annotated[
    Literal["text", "json"] | None,
    typer.Option(
        help="Format of the log of all processes; json: one object a line, with ids.",
        envvar=VARIABLE,
        show_default="text",
    ),
]


def run_config_option(help_text: str) -> Any:
    """Option with settings of a run, as text or as files."""
    return typer.Option("--run-config", "-c", metavar="KEY=VALUE...|FILE.toml", help=help_text)


NodeConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="YAML file with any of these options; the command line overrides it.",
        envvar="FLWR_DISTILL_CONFIG",
        show_default=False,
    ),
]
_NODE_OPTIONS: dict[str, tuple[type, str, str | bool]] = {
    "name": (str, "Name of this node in runs, as in ward-3.", "node-PARTITION"),
    "superlink": (str, "SuperLink's Fleet API, host:port.", "127.0.0.1:9092"),
    "insecure": (bool, "No TLS.", False),
    "root_certificates": (Path, "PEM file of the SuperLink's authority.", "the system's"),
    "auth_key": (Path, "Private key of this node, if the SuperLink needs one.", False),
    "peer_address": (str, "host:port where other nodes can send to this one directly.", False),
    "peer_authority": (
        Path,
        "PEM file of the authority that signs nodes (nodes-ca.crt).",
        "root-certificates",
    ),
    "peer_certificate": (Path, "PEM file of this node's certificate among its peers.", False),
    "peer_key": (Path, "PEM file of that certificate's private key.", False),
    "peer_revocations": (Path, "PEM file with the revoked nodes (nodes-ca.crl).", False),
    "peer_names": (
        str,
        "Nodes to exchange parcels with, as in ward-1,ward-2.",
        "all of the authority's",
    ),
    "data": (Path, "Images by class, .npz or table of this node.", False),
    "dataset": (str, "Data set of this node, if nodes have different ones.", False),
    "device": (
        str,
        "cpu; cuda:N, that GPU; cuda, the GPU with the fewest nodes; auto, like cuda, but the CPU "
        "if there is none.",
        "auto",
    ),
    "partition_id": (int, "This node's partition of the data set, from 0.", False),
    "num_partitions": (int, "Number of partitions.", False),
    "sector": (int, "This node's sector (FedHEAD), else the server draws one.", False),
    "state_dir": (Path, "Directory of this node's own files.", "state/node"),
    "threads": (int, "Threads to compute with.", "all cores"),
    "log_level": (str, "DEBUG, INFO, WARNING or ERROR.", "INFO"),
    "log_format": (str, "text, or json: one object a line, with ids.", "text"),
    "metrics_port": (int, "Port for Prometheus metrics, without TLS.", "none"),
    "connect_timeout": (float, "Seconds to wait for the SuperLink at the start.", "60"),
    "release_after": (float, "Idle seconds after which (GPU) memory is freed.", "120"),
    "keep_warm": (bool, "Keep PyTorch loaded when idle.", False),
    "poll_busy": (float, "Shortest pause between polls for messages, in seconds.", "0.05"),
    "poll_idle": (float, "Longest pause, in seconds, after 17 minutes without work.", "20"),
    "max_rate": (float, "Megabits per second of models and other contents, both ways.", "no limit"),
    "quiet_hours": (str, "Local time without contents, as in 08:00-18:00.", "none"),
    "keep_runs": (float, "Days to keep files of runs, except budgets.", "30"),
    "policy": (str, "What runs may do: standard, open, hospital, or a YAML file.", "standard"),
}
"""Type, help and default of options that are also environment variables."""
NODE_OPTIONS = tuple(_NODE_OPTIONS)


def with_options(
    parameter: str,
    gather: Callable[..., Any],
    options: Iterable[inspect.Parameter] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command options in place of a parameter, which gets `gather(**values)`.

    Without `options` they are the parameters of `gather`.
    """
    shared = list(options or inspect.signature(gather, eval_str=True).parameters.values())

    def add(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def with_shared(**values: Any) -> None:
            values[parameter] = gather(**{each.name: values.pop(each.name) for each in shared})
            command(**values)

        own = inspect.signature(command, eval_str=True)
        all_options = [
            option.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for each in own.parameters.values()
            for option in (shared if each.name == parameter else [each])
        ]
        with_shared.__signature__ = own.replace(parameters=all_options)  # type: ignore[attr-defined]
        return with_shared

    return add


def with_node_options(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command these options of a node, in its parameter `settings`: a dict by name."""

    def option(name: str) -> inspect.Parameter:
        kind, text, default = _NODE_OPTIONS[name]
        declared = typer.Option(
            None,
            f"--{name.replace('_', '-')}",
            help=text,
            envvar=f"FLWR_DISTILL_{name.upper()}",
            show_default=default,
        )
        return inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=declared, annotation=kind | None
        )

    return with_options("settings", dict, map(option, names))


def read_node_config(config: Path | None) -> dict[str, Any]:
    """Settings in the file of `NodeConfigFile`, by option, checked as a node would."""
    load_settings(config, {})
    content = yaml.safe_load(read_text(config)) if config else {}
    return {str(key).replace("_", "-"): value for key, value in content.items()}
