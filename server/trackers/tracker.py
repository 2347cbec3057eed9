"""A hook that sends a run to a service, without ever making the run wait for it."""

import os
import re
import threading
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from logging import WARNING
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from flwr.app import ArrayRecord
from flwr.common import log

from flwr_distill.protocol.meeting import one_line
from flwr_distill.server.export.card import model_card
from flwr_distill.server.export.model import ExportError, export_model, run_to_export
from flwr_distill.server.hooks import Hook, RoundEnd, RunEnd, RunStart
from flwr_distill.server.page.run_files import RunFiles, flat, read_run
from flwr_distill.server.record.scalars import scalars

PROJECT = "flwr-distill"
"""Where the service keeps the runs, unless its own environment variables say otherwise."""
FIRST_ANSWER = 30.0
"""Seconds that the end of a run waits for a service that has never answered."""
UPLOAD = 120.0
"""Seconds that it waits for one that has; the files go there then."""
FILES = (".html", ".json", ".jsonl", ".png")
"""Endings of the run's files that are sent; checkpoints and strategies' own files are not."""
_USER = re.compile(r"//[^/@\s]+@")
_SECRET = re.compile(r"KEY|TOKEN|PASSWORD|SECRET")


@dataclass(frozen=True)
class Model:
    """A folder with a run's model and its card, which is also a text; `name` groups versions."""

    name: str
    folder: Path
    card: str


class Tracker(Hook):
    """Sends a run to a service from a thread of its own.

    Subclasses call the service; each of their methods may raise or hang. What could not be sent is
    sent with the next round. The log names the first error, and at the end whether all was sent.
    """

    package: ClassVar[str]
    """The service's package, and the extra of ours that installs it."""

    def __init__(self) -> None:
        if find_spec(self.package) is None:
            raise ModuleNotFoundError(
                f"the package {self.package} is missing where the ServerApp runs: "
                f"pip install 'flwr-distill[{self.package}]'"
            )
        self._rows = list[Any]()
        self._sent = 0
        self._news = threading.Event()
        self._end = ""
        self._is_open = self._is_complete = False
        self._problem = ""
        self._thread = threading.Thread(target=self._send, name=self.package, daemon=True)

    @abstractmethod
    def open(self, run: RunFiles, settings: Mapping[str, Any]) -> None:
        """Start a run there, or continue it: a resumed run has the same folder."""

    @abstractmethod
    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Add the numbers of a round."""

    @abstractmethod
    def close(self, files: Sequence[Path], model: Model | None, *, failed: bool) -> None:
        """Add files and model, and end the run there."""

    def on_run_start(self, run: RunStart) -> None:
        """Start the thread."""
        self._folder = run.folder
        self._rows += run.rows
        self._thread.start()
        self._news.set()

    def on_round_end(self, end: RoundEnd) -> None:
        """Have the round's numbers sent."""
        self._rows.append(end.row)
        self._news.set()

    def on_failure(self, error: Exception, model: ArrayRecord | None) -> None:
        """Have the files so far sent."""
        self._finish("failed")

    def on_run_end(self, end: RunEnd) -> None:
        """Have files and model sent."""
        self._finish("done")

    def _finish(self, how: str) -> None:
        self._end = how
        self._news.set()
        patience = UPLOAD if self._is_open else FIRST_ANSWER
        self._thread.join(patience)
        if not self._is_complete:
            why = self._problem if not self._thread.is_alive() else f"no answer in {patience:.0f} s"
            text = "%s does not have all of this run (%s); its files are in %s"
            log(WARNING, text, self.package, why, self._folder)

    def _send(self) -> None:
        end = ""
        while not end:
            self._news.wait()
            self._news.clear()
            end = self._end
            try:
                self._send_news(end)
            except Exception as error:  # whatever a service makes its package raise
                is_first = not self._problem
                self._problem = f"{type(error).__name__}: {_without_secrets(one_line(error))}"
                if is_first:
                    text = "%s does not take this run's numbers; the run continues: %s"
                    log(WARNING, text, self.package, self._problem)

    def _send_news(self, end: str) -> None:
        run = read_run(self._folder)
        if not self._is_open:
            self.open(run, flat(run.settings))
            self._is_open = True
        while self._sent < len(self._rows):
            row = self._rows[self._sent]
            self.log(scalars(row), row.round)
            self._sent += 1
        if end:
            files = [file for file in sorted(self._folder.iterdir()) if file.suffix in FILES]
            with TemporaryDirectory() as folder:
                model = None if end == "failed" else _model_of(run, Path(folder))
                self.close(files, model, failed=end == "failed")
            self._is_complete = True


def _model_of(run: RunFiles, folder: Path) -> Model | None:
    """A run's model with its card; None if nodes keep models of their own."""
    with suppress(ExportError):
        run = run_to_export(run)
        file = export_model(run, "safetensors", folder)
        card = model_card(run, file.name)
        (folder / "model-card.md").write_text(card, encoding="utf-8")
        name = f"{run.settings['strategy']}-{run.settings['dataset']}"
        return Model(re.sub(r"[^\w.-]", "-", name), folder, card)
    return None


def _without_secrets(text: str) -> str:
    """An error's text without the names, keys and passwords by which a service was called."""
    text = _USER.sub("//...@", text)
    for name, value in os.environ.items():
        if value and _SECRET.search(name):
            text = text.replace(value, "...")
    return text
