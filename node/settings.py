"""A node's settings, from command line, environment or YAML file, checked in one place."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from flwr_distill.links.loopback import is_loopback
from flwr_distill.links.records import NodeName
from flwr_distill.node.policy import STANDARD, Policy, read_policy
from flwr_distill.protocol.messages import (
    CLASSES,
    EDGE,
    FEWEST_OF_A_CLASS,
    FILE,
    HOLDOUT,
    HOLDOUT_SECRET,
    REAL_PER_VIRTUAL,
)
from flwr_distill.task.auxiliary_names import OWN_FILE
from flwr_distill.task.text_files import EncodingError, read_text

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

NodeConfigValue = bool | int | float | str
DATA_ROOT = "data-root"
"""Key of the node config: folder of named data sets, before the run's."""
NODE_CONFIG = "node-config.toml"
"""File in the state directory with what apps see of these settings."""

FLOWER_HOME = "flower"
"""Folder in the state directory that is ``FLWR_HOME`` for a node's processes."""

_OWN_KEYS = {
    CLASSES,
    FEWEST_OF_A_CLASS,
    REAL_PER_VIRTUAL,
    HOLDOUT,
    HOLDOUT_SECRET,
    EDGE,
    *("name", "partition-id", "num-partitions", "sector", "device", "data", "dataset"),
    "state-dir",
    *("peer-address", "peer-certificate", "peer-key", "peer-authority"),
    *("peer-revocations", "peer-names"),
}


class NodeError(Exception):
    """The node cannot work."""


class NodeSettings(BaseModel):
    """Settings of a node; `flwr-distill node --help` explains those that are options there.

    Attributes
    ----------
    name : str | None (default: None)
        What people call this node: 1 to 40 printable characters, in the run's log and report.
        Without one it is called by its partition, as in ``node-3``.
    auth_key : Path | None (default: None)
        Private key (OpenSSH, NIST curve), for SuperLinks that admit only registered nodes.
    peer_certificate : Path | None (default: None)
        PEM certificate for client and server authentication, on an elliptic curve, signed by the
        authority in `peer_authority`. Needed to send directly to other machines.
    peer_authority : Path | None (default: None)
        PEM certificate of the authority that signs nodes; None for `root_certificates`, of an
        authority that signs both SuperLink and nodes.
    peer_revocations : Path | None (default: None)
        PEM revocation list of that authority. It is read for every parcel.
    peer_names : str | None (default: None)
        Names, with commas between them, of the nodes that this one sends to and takes parcels
        from, as in their certificates; None for all of the authority's.
    dataset : str | None (default: None)
        Named data set that this node holds in place of the run's, converted to the run's image
        shape; the node is tested on that set's own test samples.
    files : dict[str, Path] (default: {})
        Files and folders that runs may name, each as ``@NAME``: auxiliary images, network weights.
    device : str (default: "auto")
        See `node.device.take_device`; apps see the device that was taken, as in ``cuda:1``.
    preload : tuple[str, ...] (default: ("torch",))
        Modules that the app's process imports before the first message. With PyTorch, its compiler
        is imported once something is compiled (`node.compiler`), or if it is named here
        (``torch._dynamo``).
    release_after : float (default: 120.0)
        Seconds without a message after which the app's process ends, with what it holds of memory
        and GPU. The next message starts another.
    keep_warm : bool (default: False)
        Start the next one at once, so that it has imported `preload` when a message comes.
    keep_runs : float (default: 30.0)
        Days after their last change that files of runs are kept in the state directory. What was
        spent of a privacy budget is kept for good.
    policy : Policy (default: STANDARD)
        What runs may ask of the node: a preset's name, a YAML file, or what such a file holds.
    poll_busy, poll_idle : float (default: 0.05, 20.0)
        Shortest and longest pause between polls for messages, in seconds; see `node.pace.pause`.
    edge : Path | None (default: None)
        Folder of the sockets of the edge that this node speaks for; ``flwr-distill edge`` sets it.
        Such a node has no data.
    connect_timeout : float (default: 60.0)
        Seconds to wait for the SuperLink at the start. The node waits out later outages.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: NodeName | None = None
    superlink: str = "127.0.0.1:9092"
    insecure: bool = False
    root_certificates: Path | None = None
    auth_key: Path | None = None
    peer_address: str | None = Field(default=None, pattern=r"^.+:[0-9]{1,5}$")
    peer_authority: Path | None = None
    peer_certificate: Path | None = None
    peer_key: Path | None = None
    peer_revocations: Path | None = None
    peer_names: str | None = Field(default=None, pattern=r"^[^,\s]+(,[^,\s]+)*$")
    partition_id: int | None = Field(default=None, ge=0)
    num_partitions: int | None = Field(default=None, ge=1)
    sector: int | None = Field(default=None, ge=0)
    data: Path | None = None
    dataset: str | None = Field(default=None, min_length=1)
    files: dict[str, Path] = {}
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    threads: int = Field(default_factory=lambda: os.cpu_count() or 1, ge=1)
    state_dir: Path = Path("state/node")
    preload: tuple[str, ...] = ("torch",)
    release_after: float = Field(default=120.0, gt=0)
    keep_warm: bool = False
    keep_runs: float = Field(default=30.0, gt=0)
    poll_busy: float = Field(default=0.05, ge=0.01, le=60)
    poll_idle: float = Field(default=20.0, ge=0.01, le=600)
    edge: Path | None = None
    metrics_port: int | None = Field(default=None, ge=1, le=65535)
    connect_timeout: float = Field(default=60.0, ge=0)
    log_level: str = Field(default="INFO", pattern="^(DEBUG|INFO|WARNING|ERROR)$")
    node_config: dict[str, NodeConfigValue] = {}
    policy: Policy = STANDARD

    @field_validator("policy", mode="before")
    @classmethod
    def _read_policy(cls, source: object) -> object:
        return source if isinstance(source, Policy) else read_policy(source)

    @field_validator(
        *("root_certificates", "auth_key", "peer_certificate", "peer_key", "peer_revocations"),
        *("peer_authority", "data"),
    )
    @classmethod
    def _check_exists(cls, path: Path | None) -> Path | None:
        if path is None:
            return None
        path = path.expanduser().resolve()
        if not path.exists():
            raise ValueError(f"{path} does not exist")
        return path

    @field_validator("files")
    @classmethod
    def _check_files(cls, files: dict[str, Path]) -> dict[str, Path]:
        for name, path in files.items():
            if not OWN_FILE.fullmatch(f"@{name}"):
                raise ValueError(f"{name!r}: a name has letters, digits, and - _ . in it")
            if not path.expanduser().exists():
                raise ValueError(f"{name}: {path} does not exist")
        return {name: path.expanduser().resolve() for name, path in files.items()}

    @field_validator("state_dir")
    @classmethod
    def _resolve(cls, path: Path) -> Path:
        return path.expanduser().resolve()

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
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
        if self.poll_busy > self.poll_idle:
            raise ValueError(
                f"poll-busy={self.poll_busy} must not be above poll-idle={self.poll_idle}"
            )
        if self.data is not None and self.dataset is not None:
            raise ValueError(f"data and dataset={self.dataset} exclude each other: drop one")
        if self.edge is not None:
            for name in ("data", "dataset", "partition_id", "sector", "peer_address"):
                if (value := getattr(self, name)) is not None:
                    raise ValueError(
                        f"{name.replace('_', '-')}={value}: an edge has none, its nodes below have"
                    )
        if self.edge is None:
            self._check_classes()
        if self.insecure and self.root_certificates is not None:
            raise ValueError("insecure and root-certificates exclude each other: drop one")
        if self.insecure and self.auth_key is not None:
            raise ValueError("auth-key needs TLS: drop insecure, and give root-certificates")
        if (self.peer_certificate is None) != (self.peer_key is None):
            raise ValueError("peer-certificate and peer-key need each other: give both")
        for name in ("peer_authority", "peer_revocations", "peer_names"):
            if getattr(self, name) is not None and self.peer_certificate is None:
                raise ValueError(f"{name.replace('_', '-')} needs peer-certificate and peer-key")
        if self.peer_certificate is not None and self.root_certificates is None:
            raise ValueError("peer-certificate needs root-certificates: their authority")
        peer = self.peer_address
        if peer and not self.peer_certificate and not is_loopback(peer):
            raise ValueError(
                f"peer-address={peer} is reached from other machines: give "
                "peer-certificate and peer-key, or an address on loopback"
            )
        own = {key for key in self.node_config if key.startswith(FILE)}
        if options := own | (_OWN_KEYS & self.node_config.keys()):
            raise ValueError(f"node-config: {min(options)} is an option of its own, use that")
        return self

    def _check_classes(self) -> None:
        """Check that the node can keep its policy's rule on classes."""
        policy = self.policy
        fewest = f"policy: fewest-of-a-class = {policy.fewest_of_a_class}"
        if policy.classes is not None and self.data is None:
            raise ValueError("policy: classes needs data, in which they are (give data)")
        if policy.counts_classes and self.data is None:
            raise ValueError(
                f"{fewest} needs data, which the node can count (give data, or set it to 1)"
            )
        if policy.counts_classes and policy.promises_privacy:
            raise ValueError(
                f"{fewest}, and one sample less would take a class away, which differential "
                "privacy must hide (name in the policy's file the classes that have enough, as in "
                "`classes: [cat, dog]`; flwr-distill data check shows how many)"
            )

    @property
    def _data_root(self) -> str:
        """Folder of named data sets, where a run's own ``data-root`` may not count."""
        return os.environ.get("FLWR_DISTILL_DATA_ROOT", "data")

    @property
    def _peer_authority(self) -> Path | None:
        if self.peer_certificate is None:
            return None
        return self.peer_authority or self.root_certificates

    @property
    def app_config(self) -> dict[str, NodeConfigValue]:
        """The node config that apps see in ``context.node_config``."""
        policy = self.policy
        values: dict[str, NodeConfigValue | Path | None] = {
            "name": self.name,
            "device": self.device,
            "state-dir": self.state_dir,
            "partition-id": self.partition_id,
            "num-partitions": self.num_partitions,
            "sector": self.sector,
            "data": self.data,
            "dataset": self.dataset,
            "peer-address": self.peer_address,
            "peer-authority": self._peer_authority,
            "peer-certificate": self.peer_certificate,
            "peer-key": self.peer_key,
            "peer-revocations": self.peer_revocations,
            "peer-names": self.peer_names,
            EDGE: self.edge,
            FEWEST_OF_A_CLASS: policy.fewest_of_a_class if policy.counts_classes else None,
            REAL_PER_VIRTUAL: policy.real_per_virtual if self.data is not None else None,
            CLASSES: None if policy.classes is None else ",".join(policy.classes),
            HOLDOUT: policy.holdout,
            DATA_ROOT: self._data_root if policy.settings == "listed" else None,
            **{f"{FILE}@{name}": path for name, path in self.files.items()},
        }
        config = {
            key: str(value) if isinstance(value, Path) else value
            for key, value in values.items()
            if value is not None
        }
        return config | self.node_config


def load_settings(file: Path | None, options: dict[str, Any]) -> NodeSettings:
    """Build settings from a YAML file and from options, which override it unless they are None.

    The file's keys are the option names, with hyphens (``partition-id: 3``).
    """
    settings = _read_yaml(file) if file is not None else {}
    settings |= {name: value for name, value in options.items() if value is not None}
    try:
        return NodeSettings(**settings)
    except ValidationError as error:
        raise NodeError("; ".join(map(_describe, error.errors()))) from error


def flat_toml(values: Mapping[str, Any]) -> str:
    """Write a flat mapping as TOML, where strings, numbers and booleans look as in JSON."""
    return "".join(
        f"{json.dumps(key)} = {json.dumps(value, ensure_ascii=False)}\n"
        for key, value in values.items()
    )


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(read_text(file))
    except (OSError, EncodingError, yaml.YAMLError) as error:
        raise NodeError(f"config={file} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise NodeError(f"config={file} must hold settings such as `superlink: host:9092`")
    return {str(key).replace("-", "_"): value for key, value in content.items()}


def _describe(problem: ErrorDetails) -> str:
    name = ".".join(str(part) for part in problem["loc"]).replace("_", "-")
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        allowed = ", ".join(NodeSettings.model_fields).replace("_", "-")
        message = f"there is no such setting (there are {allowed})"
    return f"{name}={problem['input']}: {message}" if name else message
