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
    """What the run started from, what its settings disclose, and the method's own sections."""
    text = disclosed(run)
    sections = [Section("What left the nodes", [text])] if text else []
    if start := run.settings.get("start"):
        made = f"Training started from the model that {start} made, in one phase before round 1."
        sections = [Section("Start", [made]), *sections]
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
    arguments = run.settings.get("strategy-args", "")
    start = find_method(run.settings.get("start", ""))
    texts = [_disclosed(run, start, ""), _disclosed(run, method_of_run(run), arguments)]
    return " ".join(filter(None, texts))


def _disclosed(run: RunFiles, method: Method | None, arguments: str) -> str:
    if method is None or method.disclosed is None:
        return ""
    table = run.settings.get(method.table_name, {})
    try:
        return method.disclosed(method_settings(method, table, arguments))
    except SettingsError:
        return ""  # settings of another version: their meaning is unknown


def method_of_run(run: RunFiles) -> Method | None:
    """Method of a run's strategy; None if it is not installed here."""
    name = run.settings["strategy"]
    try:
        return find_method(name) or (find_strategy(name)[1] if ":" in name else None)
    except SettingsError:
        return None
