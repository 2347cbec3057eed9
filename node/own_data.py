"""What a node knows of its own data, without its app."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr_distill.node.account import DataSet
from flwr_distill.node.requests import MessageRequest, table_of
from flwr_distill.protocol.meeting import one_line
from flwr_distill.task.errors import DatasetError, SettingsError
from flwr_distill.task.file_state import read_once
from flwr_distill.task.image_files import class_names
from flwr_distill.task.settings import PrivateSettings
from flwr_distill.task.survey import survey

_MAX_CLASSES = 100
"""Classes that are named: a run may have ten thousand, with names of its choice."""


class OwnData:
    """The data that a node config names, read again when they have changed."""

    def __init__(self, node_config: Mapping[str, Any]) -> None:
        self._node_config = node_config
        self.counts = read_once(self._files, maxsize=1)(self._count_samples)
        """Samples of each class, by a function."""
        self._identify = read_once(self._files, maxsize=1)(self._identify_data)

    @property
    def is_there(self) -> bool:
        """Whether the node has data of its own."""
        return "data" in self._node_config

    def identify(self, run_config: Mapping[str, Any]) -> DataSet:
        """The data set that a run uses here."""
        if self.is_there:
            return self._identify()
        name = self._node_config.get("dataset", run_config.get("dataset", ""))
        own = [self._node_config.get(key, "") for key in ("partition-id", "num-partitions")]
        return DataSet(f"{one_line(name)} {own[0]}/{own[1]}")

    def class_names(self) -> list[str]:
        """Names of all classes by the node's images; empty if there are none."""
        try:
            data = self._node_config.get("data")
            return list(class_names(str(data))) if data is not None else []
        except DatasetError:
            return []

    def class_names_in(self, request: MessageRequest) -> list[str]:
        """Names of a run's first classes, as far as the node knows them."""
        if request.run_config.get("dataset") != "private":
            return []
        try:
            table = table_of(request.run_config, "private")
            names = PrivateSettings.checked(table, "run config").class_names
        except SettingsError:
            return []
        return list(names or self.class_names())[:_MAX_CLASSES]

    def _files(self) -> list[Path]:
        return [Path(self._node_config["data"])]

    def _count_samples(self) -> list[int]:
        (data,) = self._files()
        return list(survey(data, decode=False).counts.values())

    def _identify_data(self) -> DataSet:
        (data,) = self._files()
        return DataSet.at(data)
