"""The epsilon that has left a node over all runs, for each data set; it never falls.

A run's own account (`client.dp_sgd`) is kept by the app and ends with the run. This one is kept by
the node, from what replies say they cost, and outlasts runs, resumed ones and restarts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from task.durable import replacing
from task.settings import SettingsError

_FORMAT = "flwr-distill/lifetime-epsilon/1"


class LifetimeAccount:
    """Lifetime epsilon by data set, in a file that is synced before anything leaves.

    Runs on the same data add up. A run says what it has spent so far, and one that resumes another
    goes on from there, so only the difference is added; if that is below 0, the run's account has
    begun anew, and all of it is added.
    """

    def __init__(self, file: Path) -> None:
        self._file = file

    def left(self, data: str) -> float:
        """Epsilon that has left on a data set."""
        return float(self._read().get(data, {}).get("left", 0.0))

    def evaluations(self, data: str) -> int:
        """Evaluations on a data set that have left."""
        return int(self._read().get(data, {}).get("evaluations", 0))

    def after(self, data: str, run: str, claim: float | None) -> float:
        """Epsilon that will have left on a data set.

        Parameters
        ----------
        run : str
            The first of a chain of resumed runs.
        claim : float, optional
            Epsilon that these have spent so far, as the reply says.
        """
        return float(self._changed(self._read(), data, run, claim)[data]["left"])

    def book(self, data: str, run: str, claim: float | None) -> None:
        """Book what a reply says that it costs; call it before the reply leaves.

        Raises
        ------
        OSError
            If the file cannot be written.
        """
        if claim is None:
            return
        self._write(self._changed(self._read(), data, run, claim))

    def book_evaluation(self, data: str, epsilon: float) -> None:
        """Book an evaluation and what it costs; call it before the reply leaves.

        Raises
        ------
        OSError
            If the file cannot be written.
        """
        accounts = self._read()
        own = {"left": 0.0, "runs": {}, "evaluations": 0} | accounts.get(data, {})
        own |= {"left": own["left"] + epsilon, "evaluations": own["evaluations"] + 1}
        self._write({**accounts, data: own})

    def _write(self, accounts: Mapping[str, Any]) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self._file) as partial:
            partial.touch(mode=0o600)
            partial.write_text(json.dumps({"format": _FORMAT, "data": accounts}), encoding="utf-8")

    def _changed(
        self, accounts: Mapping[str, Any], data: str, run: str, claim: float | None
    ) -> dict[str, Any]:
        own = accounts.get(data, {"left": 0.0, "runs": {}})
        last = own["runs"].get(run, 0.0)
        if claim is None:
            claim = last
        if math.isnan(claim) or claim < 0:
            claim = math.inf
        added = claim - last if claim >= last else claim
        runs = {**own["runs"], run: claim}
        return {**accounts, data: {**own, "left": own["left"] + added, "runs": runs}}

    def _read(self) -> dict[str, Any]:
        try:
            content = json.loads(self._file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise SettingsError(f"{self._file} cannot be read: {error}") from error
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise SettingsError(f"{self._file} is no account of this version: {_FORMAT}")
        accounts: dict[str, Any] = content["data"]
        return accounts
