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
from flwr_distill.node.link import QuietHours
from flwr_distill.node.policy import STANDARD, Policy, read_policy
from flwr_distill.protocol.messages import (
    CLASSES,
    COUNTS_EPSILON,
    EDGE,
    FILE,
    HOLDOUT,
    HOLDOUT_SECRET,
    MIN_OF_A_CLASS,
    REAL_PER_VIRTUAL,
    STATISTICS,
)
from flwr_distill.task.auxiliary_names import OWN_FILE
from flwr_distill.task.errors import ReportedError, SettingsError
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


class NodeError(ReportedError):
    """The node cannot work."""


class NodeSettings(BaseModel):
    """Settings of a node; `flwr-distill node --help` explains those that are options there."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: NodeName | None = None
    """What people call this node: 1 to 40 printable characters, in the run's log and report.
    Without one its partition names it, as in ``node-3``."""
    superlink: str = "127.0.0.1:9092"
    insecure: bool = False
    root_certificates: Path | None = None
    auth_key: Path | None = None
    """Private key (OpenSSH, NIST curve), for SuperLinks that admit only registered nodes."""
    peer_address: str | None = Field(default=None, pattern=r"^.+:[0-9]{1,5}$")
    peer_authority: Path | None = None
    """PEM certificate of the authority that signs nodes; None for `root_certificates`, of an
    authority that signs both SuperLink and nodes."""
    peer_certificate: Path | None = None
    """PEM certificate for client and server authentication, on an elliptic curve, signed by the
    authority in `peer_authority`. Needed to send directly to other machines."""
    peer_key: Path | None = None
    peer_revocations: Path | None = None
    """PEM revocation list of that authority. It is read for every parcel."""
    peer_names: str | None = Field(default=None, pattern=r"^[^,\s]+(,[^,\s]+)*$")
    """Names, with commas between them, of the nodes that this one sends to and takes parcels from,
    as in their certificates; None for all of the authority's."""
    partition_id: int | None = Field(default=None, ge=0)
    num_partitions: int | None = Field(default=None, ge=1)
    sector: int | None = Field(default=None, ge=0)
    data: Path | None = None
    dataset: str | None = Field(default=None, min_length=1)
    """Named data set that this node has in place of the run's, converted to the run's image shape;
    the node is tested on that set's own test samples."""
    files: dict[str, Path] = {}
    """Files and folders that runs may name, each as ``@NAME``: auxiliary images, network weights.
    """
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """See `node.device.take_device`; apps see the device that was taken, as in ``cuda:1``."""
    threads: int = Field(default_factory=lambda: os.cpu_count() or 1, ge=1)
    state_dir: Path = Path("state/node")
    preload: tuple[str, ...] = ("torch",)
    """Modules that the app's process imports before the first message. With PyTorch, its compiler
    is imported once something is compiled (`node.compiler`), or if it is named here
    (``torch._dynamo``)."""
    release_after: float = Field(default=120.0, gt=0)
    """Seconds without a message after which the app's process ends, and frees memory and GPU. The
    next message starts another."""
    keep_warm: bool = False
    """Start the next one at once, so that it has imported `preload` when a message comes."""
    keep_runs: float = Field(default=30.0, gt=0)
    """Days after their last change that files of runs are kept in the state directory. What was
    spent of a privacy budget is kept for good."""
    poll_busy: float = Field(default=0.05, ge=0.01, le=60)
    """Shortest pause between polls for messages, in seconds; see `node.pace.pause`."""
    poll_idle: float = Field(default=20.0, ge=0.01, le=600)
    """Longest pause between polls."""
    max_rate: float | None = Field(default=None, ge=0.01, allow_inf_nan=False)
    """Megabits per second of contents (models, parcels, app bundles), from and to the SuperLink
    together; None for no limit. See `node.link.Link`."""
    quiet_hours: str | None = None
    """Local time in which no contents move, as in ``08:00-18:00``; it may cross midnight."""
    edge: Path | None = None
    """Folder of the sockets of the edge that this node speaks for; ``flwr-distill edge`` sets it.
    Such a node has no data."""
    metrics_port: int | None = Field(default=None, ge=1, le=65535)
    connect_timeout: float = Field(default=60.0, ge=0)
    """Seconds to wait for the SuperLink at the start. The node waits out later outages."""
    log_level: str = Field(default="INFO", pattern="^(DEBUG|INFO|WARNING|ERROR)$")
    log_format: str = Field(default="text", pattern="^(text|json)$")
    node_config: dict[str, NodeConfigValue] = {}
    policy: Policy = STANDARD
    """What runs may ask of the node: a preset's name, a YAML file, or the content of such a file.
    """

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

    @field_validator("quiet_hours")
    @classmethod
    def _check_quiet_hours(cls, text: str | None) -> str | None:
        if text is not None:
            QuietHours.parse(text)
        return text

    @field_validator("state_dir")
    @classmethod
    def _resolve(cls, path: Path) -> Path:
        return path.expanduser().resolve()

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        self._check_data()
        self._check_keys()
        if self.poll_busy > self.poll_idle:
            raise ValueError(
                f"poll-busy={self.poll_busy} must not be above poll-idle={self.poll_idle}"
            )
        own = {*self._own_config, HOLDOUT_SECRET} - {DATA_ROOT}
        if taken := [key for key in self.node_config if key in own or key.startswith(FILE)]:
            raise ValueError(f"node-config: {taken[0]} is a setting itself, use that")
        return self

    def _check_data(self) -> None:
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
        if self.edge is None:
            self._check_classes()
            return
        for name in ("data", "dataset", "partition_id", "sector", "peer_address"):
            if (value := getattr(self, name)) is not None:
                raise ValueError(
                    f"{name.replace('_', '-')}={value}: an edge has none, its nodes below have"
                )

    def _check_classes(self) -> None:
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

    def _check_keys(self) -> None:
        if self.insecure and self.root_certificates is not None:
            raise ValueError("insecure and root-certificates exclude each other: drop one")
        if self.insecure and self.auth_key is not None:
            raise ValueError("auth-key needs TLS: drop insecure, and give root-certificates")
        if (self.peer_certificate is None) != (self.peer_key is None):
            raise ValueError("peer-certificate and peer-key must be given together")
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
        for name in ("max_rate", "quiet_hours"):
            if peer and (value := getattr(self, name)) is not None:
                raise ValueError(
                    f"{name.replace('_', '-')}={value} does not limit what other nodes send to "
                    f"peer-address={peer}: drop peer-address, and the SuperLink passes it on"
                )

    @property
    def place(self) -> str:
        """What runs call a node without a name: its partition; '' without one too."""
        if self.partition_id is None:
            return ""
        own = f"{self.dataset}/" if self.dataset else "node-"
        return f"{own}{self.partition_id}"

    @property
    def _own_config(self) -> dict[str, NodeConfigValue | Path | None]:
        """What apps see of these settings; None is left away."""
        policy, listed = self.policy, self.policy.settings == "listed"
        authority = self.peer_authority or self.root_certificates
        return {
            "name": self.name,
            "device": self.device,
            "state-dir": self.state_dir,
            "partition-id": self.partition_id,
            "num-partitions": self.num_partitions,
            "sector": self.sector,
            "data": self.data,
            "dataset": self.dataset,
            "peer-address": self.peer_address,
            "peer-authority": self.peer_certificate and authority,
            "peer-certificate": self.peer_certificate,
            "peer-key": self.peer_key,
            "peer-revocations": self.peer_revocations,
            "peer-names": self.peer_names,
            EDGE: self.edge,
            MIN_OF_A_CLASS: policy.fewest_of_a_class if policy.counts_classes else None,
            REAL_PER_VIRTUAL: policy.real_per_virtual if self.data is not None else None,
            CLASSES: None if policy.classes is None else ",".join(policy.classes),
            HOLDOUT: policy.holdout,
            COUNTS_EPSILON: policy.counts_epsilon,
            STATISTICS: policy.statistics if policy.statistics == "allowed" else None,
            # Then a run's own does not count.
            DATA_ROOT: os.environ.get("FLWR_DISTILL_DATA_ROOT", "data") if listed else None,
            **{f"{FILE}@{name}": path for name, path in self.files.items()},
        }

    @property
    def app_config(self) -> dict[str, NodeConfigValue]:
        """The node config that apps see in ``context.node_config``."""
        own = {k: v for k, v in self._own_config.items() if v is not None}
        config = {k: str(v) if isinstance(v, Path) else v for k, v in own.items()}
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
        problems = [_reported(problem) for problem in error.errors()]
        if len(problems) == 1:
            raise problems[0] from error
        raise NodeError("; ".join(map(str, problems))) from error


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
        problem = f"unreadable: {' '.join(str(error).split())}"
        raise NodeError(problem, where="config", value=str(file)) from error
    if not isinstance(content, dict):
        problem = "must have settings such as `superlink: host:9092`"
        raise NodeError(problem, where="config", value=str(file))
    return {str(key).replace("-", "_"): value for key, value in content.items()}


def _reported(problem: ErrorDetails) -> NodeError:
    name = ".".join(str(part) for part in problem["loc"]).replace("_", "-")
    if problem["type"] == "extra_forbidden":
        allowed = ", ".join(NodeSettings.model_fields).replace("_", "-")
        remedy = f"there are {allowed}"
        return NodeError("unknown setting", where=name, value=problem["input"], remedy=remedy)
    cause = problem.get("ctx", {}).get("error")
    if isinstance(cause, SettingsError):  # of the policy, which names its own keys
        where = ": ".join(filter(None, [cause.source, cause.where]))
        return NodeError(cause.problem, where=where, value=cause.value, remedy=cause.remedy)
    message = problem["msg"].removeprefix("Value error, ")
    return NodeError(message, where=name, value=problem["input"] if name else None)
