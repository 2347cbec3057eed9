"""A node's settings, from command line, environment or YAML file, checked in one place."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from links.loopback import is_loopback

NodeConfigValue = bool | int | float | str

_OWN_KEYS = {
    *("partition-id", "num-partitions", "sector", "device", "data", "dataset", "state-dir"),
    *("peer-address", "peer-certificate", "peer-key", "peer-authority"),
}


class NodeError(Exception):
    """The node cannot work; the text says why, in one line."""


class NodeSettings(BaseModel):
    """Everything that a node is told when it starts.

    Attributes
    ----------
    superlink : str (default: "127.0.0.1:9092")
        ``host:port`` of the SuperLink's Fleet API.
    insecure : bool (default: False)
        Talk to the SuperLink without TLS.
    root_certificates : Path | None (default: None)
        PEM file of the authority that signed the SuperLink's certificate. `None`: the system's.
    auth_key : Path | None (default: None)
        The node's private key (OpenSSH, NIST curve), for SuperLinks that admit registered nodes.
    peer_address : str | None (default: None)
        ``host:port`` where other nodes can send to this one, and where it listens for them. `None`:
        what they send comes through the SuperLink, sealed.
    peer_certificate : Path | None (default: None)
        PEM certificate of this node among its peers, for client and server authentication, signed
        by the authority in `root_certificates`. Other machines are sent to directly only with one.
    peer_key : Path | None (default: None)
        The certificate's private key, on an elliptic curve.
    partition_id : int | None (default: None)
        Which part of the data is this node's.
    num_partitions : int | None (default: None)
        Into how many parts the data are cut.
    sector : int | None (default: None)
        The sector that this node belongs to, for strategies that form sectors (FedHEAD). `None`:
        the server draws one.
    data : Path | None (default: None)
        Directory of the node's own data, handed to the app.
    dataset : str | None (default: None)
        Named data set that this node holds in place of the run's, brought to the run's images; it
        is tested on that set's own test samples.
    device : str (default: "auto")
        ``auto``, ``cpu``, ``cuda`` or ``cuda:N``, handed to the app.
    threads : int (default: number of cores)
        Threads that the app's process computes with.
    state_dir : Path (default: "state/node")
        The node's own directory: what must last, and its Flower home.
    preload : tuple[str, ...] (default: ("torch", "torch._dynamo"))
        Modules that the app's process imports before the first message. PyTorch's optimisers
        import the second at their first use, which takes as long as PyTorch itself.
    release_after : float (default: 120.0)
        Seconds without a message after which the memory, and GPU memory, of a run is given back.
    metrics_port : int | None (default: None)
        Port where the node answers Prometheus, without TLS. `None`: nowhere.
    connect_timeout : float (default: 60.0)
        Seconds to wait for the SuperLink at the start before giving up. Later outages are waited
        out, however long they take.
    log_level : str (default: "INFO")
        ``DEBUG``, ``INFO``, ``WARNING`` or ``ERROR``.
    node_config : dict[str, bool | int | float | str] (default: {})
        More keys for the app's node config.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    superlink: str = "127.0.0.1:9092"
    insecure: bool = False
    root_certificates: Path | None = None
    auth_key: Path | None = None
    peer_address: str | None = Field(default=None, pattern=r"^.+:[0-9]{1,5}$")
    peer_certificate: Path | None = None
    peer_key: Path | None = None
    partition_id: int | None = Field(default=None, ge=0)
    num_partitions: int | None = Field(default=None, ge=1)
    sector: int | None = Field(default=None, ge=0)
    data: Path | None = None
    dataset: str | None = Field(default=None, min_length=1)
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    threads: int = Field(default_factory=lambda: os.cpu_count() or 1, ge=1)
    state_dir: Path = Path("state/node")
    preload: tuple[str, ...] = ("torch", "torch._dynamo")
    release_after: float = Field(default=120.0, gt=0)
    metrics_port: int | None = Field(default=None, ge=1, le=65535)
    connect_timeout: float = Field(default=60.0, ge=0)
    log_level: str = Field(default="INFO", pattern="^(DEBUG|INFO|WARNING|ERROR)$")
    node_config: dict[str, NodeConfigValue] = {}

    @field_validator("root_certificates", "auth_key", "peer_certificate", "peer_key", "data")
    @classmethod
    def _is_there(cls, path: Path | None) -> Path | None:
        if path is None:
            return None
        path = path.expanduser().resolve()
        if not path.exists():
            raise ValueError(f"{path} does not exist")
        return path

    @field_validator("state_dir")
    @classmethod
    def _resolve(cls, path: Path) -> Path:
        return path.expanduser().resolve()

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.num_partitions is None:
            if self.partition_id is not None and self.data is None and self.dataset is None:
                raise ValueError(f"partition-id={self.partition_id} needs num-partitions")
        elif self.partition_id is None:
            raise ValueError(f"num-partitions={self.num_partitions} needs partition-id")
        elif self.partition_id >= self.num_partitions:
            raise ValueError(
                f"partition-id={self.partition_id} must be below "
                f"num-partitions={self.num_partitions}: partitions are counted from 0"
            )
        if self.data is not None and self.dataset is not None:
            raise ValueError(f"data and dataset={self.dataset} exclude each other: drop one")
        if self.insecure and self.root_certificates is not None:
            raise ValueError("insecure and root-certificates exclude each other: drop one")
        if self.insecure and self.auth_key is not None:
            raise ValueError("auth-key needs TLS: drop insecure, and give root-certificates")
        if (self.peer_certificate is None) != (self.peer_key is None):
            raise ValueError("peer-certificate and peer-key need each other: give both")
        if self.peer_certificate is not None and self.root_certificates is None:
            raise ValueError("peer-certificate needs root-certificates: who signs the nodes'")
        if self.peer_address and not (self.peer_certificate or is_loopback(self.peer_address)):
            raise ValueError(
                f"peer-address={self.peer_address} is reached from other machines: give "
                "peer-certificate and peer-key, or an address on loopback"
            )
        if taken := _OWN_KEYS & self.node_config.keys():
            raise ValueError(f"node-config: {min(taken)} is an option of its own, use that")
        return self

    @property
    def app_config(self) -> dict[str, NodeConfigValue]:
        """The node config that apps see in ``context.node_config``."""
        config: dict[str, NodeConfigValue] = {
            "device": self.device,
            "state-dir": str(self.state_dir),
        }
        if self.partition_id is not None:
            config["partition-id"] = self.partition_id
        if self.num_partitions is not None:
            config["num-partitions"] = self.num_partitions
        if self.sector is not None:
            config["sector"] = self.sector
        if self.data is not None:
            config["data"] = str(self.data)
        if self.dataset is not None:
            config["dataset"] = self.dataset
        if self.peer_address is not None:
            config["peer-address"] = self.peer_address
        if self.peer_certificate is not None:
            config["peer-authority"] = str(self.root_certificates)
            config["peer-certificate"] = str(self.peer_certificate)
            config["peer-key"] = str(self.peer_key)
        return config | self.node_config


def load_settings(file: Path | None, given: dict[str, Any]) -> NodeSettings:
    """Build settings from a YAML file and from options, which come first.

    Parameters
    ----------
    file : Path | None
        YAML file: the option names as keys, with hyphens (``partition-id: 3``).
    given : dict[str, Any]
        Settings by attribute name, from command line and environment; those that are `None` were
        not given.

    Returns
    -------
    NodeSettings
        The checked settings.

    Raises
    ------
    NodeError
        If the file cannot be read, or a setting is unknown or wrong; it names setting and value.
    """
    settings = _read_yaml(file) if file is not None else {}
    settings |= {name: value for name, value in given.items() if value is not None}
    try:
        return NodeSettings(**settings)
    except ValidationError as error:
        raise NodeError("; ".join(_complaints(error))) from error


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise NodeError(f"config={file} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise NodeError(f"config={file} must hold settings such as `superlink: host:9092`")
    return {str(key).replace("-", "_"): value for key, value in content.items()}


def _complaints(error: ValidationError) -> list[str]:
    """Say what is wrong with each setting, in one line each."""
    lines = []
    for problem in error.errors():
        name = ".".join(str(part) for part in problem["loc"]).replace("_", "-")
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            allowed = ", ".join(NodeSettings.model_fields).replace("_", "-")
            message = f"there is no such setting (there are {allowed})"
        lines.append(f"{name}={problem['input']}: {message}" if name else message)
    return lines
