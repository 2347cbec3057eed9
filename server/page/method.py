"""What the strategy's method adds to a run's report."""

import json
from typing import Any

from flwr_distill.protocol.arguments import method_settings
from flwr_distill.protocol.method import CHOICE, Method
from flwr_distill.protocol.registry import find_method
from flwr_distill.server.page.run_files import RunFiles
from flwr_distill.strategies.common.registry import find_strategy
from flwr_distill.strategies.common.sections import Section
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.plugin import PluginError, import_object


def panels(run: RunFiles) -> list[Section]:
    """What the run started from, what its settings disclose, and the method's own sections."""
    disclosure = disclosed(run)
    sections = [Section("What left the nodes", [disclosure])] if disclosure else []
    if start := run.settings["start"]:
        text = f"Training started from the model that {start} made, in one phase before round 1."
        sections = [Section("Start", [text]), *sections]
    method = method_of_run(run)
    for path in method.panels if method else ():
        try:
            panel: Any = import_object(path)
        except PluginError as error:
            sections.append(Section(path, [f"This section cannot be shown: {error}."]))
            continue
        if (section := panel(run)) is not None:
            sections.append(section)
    return sections


def disclosed(run: RunFiles) -> str:
    """What leaves nodes besides models and virtual data, under the run's settings."""
    arguments = run.settings["strategy-args"]
    method = method_of_run(run)
    choice = run.artifact(CHOICE)
    tried = [each["strategy"] for each in json.loads(choice)["tried"]] if choice else []
    methods = [
        (find_method(run.settings["start"]), ""),
        (method, arguments),
        *((find_method(name), "") for name in tried),
    ]
    texts = [
        of_method.disclosed(settings)
        for of_method, given in methods
        if of_method and of_method.disclosed
        if (settings := _settings(run, of_method, given)) is not None
    ]
    return " ".join(filter(None, texts))


def private_by_method(run: RunFiles) -> bool:
    """Whether the method's own settings put all that nodes sent under differential privacy."""
    method = method_of_run(run)
    if method is None or run.settings["start"]:
        return False
    settings = _settings(run, method, run.settings["strategy-args"])
    return settings is not None and method.epsilon(settings) > 0


def _settings(run: RunFiles, method: Method, arguments: str) -> Any:
    """The method's settings; None if they are of another version, whose meaning is unknown."""
    try:
        return method_settings(method, run.settings.get(method.table_name, {}), arguments)
    except SettingsError:
        return None


def method_of_run(run: RunFiles) -> Method | None:
    """Method of a run's strategy; None if it is not installed here."""
    name = run.settings["strategy"]
    try:
        return find_method(name) or (find_strategy(name)[1] if ":" in name else None)
    except SettingsError:
        return None
