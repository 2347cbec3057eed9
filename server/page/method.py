"""What the strategy's method adds to a run's report."""

from typing import Any

from protocol.arguments import method_settings
from protocol.method import Method
from protocol.registry import find_method
from server.page.run_files import RunFiles
from strategies.common.registry import find_strategy
from strategies.common.sections import Section
from task.plugin import PluginError, import_object
from task.settings import SettingsError


def panels(run: RunFiles) -> list[Section]:
    """The method's own sections, after what its settings disclose."""
    method = method_of_run(run)
    if method is None:
        return []
    text = disclosed(run)
    sections = [Section("What left the nodes", [text])] if text else []
    for path in method.panels:
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
    method = method_of_run(run)
    if method is None or method.disclosed is None:
        return ""
    table = run.settings.get(method.table_name, {})
    try:
        settings = method_settings(method, table, run.settings.get("strategy-args", ""))
        return method.disclosed(settings)
    except SettingsError:
        return ""  # settings of another version: their meaning is unknown


def method_of_run(run: RunFiles) -> Method | None:
    """Method of a run's strategy; None if it is not installed here."""
    name = run.settings["strategy"]
    try:
        return find_method(name) or (find_strategy(name)[1] if ":" in name else None)
    except SettingsError:
        return None
