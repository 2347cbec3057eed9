"""Report of one run."""

from pathlib import Path

from flwr_distill.server.page.costs import times, traffic, warnings
from flwr_distill.server.page.federation import partition, topology
from flwr_distill.server.page.layout import page
from flwr_distill.server.page.learning import learning
from flwr_distill.server.page.method import panels
from flwr_distill.server.page.notices import errors, notices
from flwr_distill.server.page.numbers import numbers
from flwr_distill.server.page.privacy import privacy
from flwr_distill.server.page.run_files import REPORT, RunFiles, flat, read_run
from flwr_distill.strategies.common.sections import Section, Table


def write_report(folder: Path) -> Path:
    """Write ``report.html`` from the files in a run's folder."""
    report = folder / REPORT
    report.write_text(run_page(read_run(folder)), encoding="utf-8")
    return report


def run_page(run: RunFiles) -> str:
    """HTML page of a run; sections without content are left out."""
    sections = [
        errors(run),
        notices(run),
        learning(run),
        topology(run),
        partition(run),
        traffic(run),
        times(run),
        warnings(run),
        *panels(run),
        privacy(run),
        _settings(run),
    ]
    started = str(run.about.get("started", "")).replace("T", " ").replace("+00:00", " UTC")
    return page(
        run.title,
        f"Run {run.folder.name}" + (f", started {started}" if started else ""),
        [section for section in sections if section],
        numbers(run),
    )


def _label_map(run: RunFiles) -> list[Table]:
    """What the model's outputs mean; nothing for runs of earlier versions without names."""
    rows = [[str(label), name] for label, name in enumerate(run.class_names)]
    digest = run.about.get("labels", "")
    return [Table(["output", "class"], rows, folded=f"Label map {digest}")] if rows else []


def _settings(run: RunFiles) -> Section:
    rows = [[key, str(value)] for key, value in flat(run.settings).items()]
    versions = [[package, version] for package, version in run.about.get("versions", {}).items()]
    read = [
        [node["name"], str(node["samples"]), node["fingerprint"]]
        for node in run.about.get("nodes", {}).values()
        if node.get("fingerprint")
    ]
    if own := run.about.get("fingerprint"):
        read.append(["server", "", own])
    tables = [
        Table(["setting", "value"], [[key, str(v)] for key, v in run.changed_settings.items()]),
        Table(["setting", "value"], rows, folded=f"All {len(rows)} settings"),
        Table(["package", "version"], versions, folded="Versions"),
        *(
            [Table(["data of", "#samples", "fingerprint"], read, folded="Data as read")]
            if read
            else []
        ),
        *_label_map(run),
    ]
    return Section(
        "Settings", ["The strategy, and settings that differ from the defaults:"], tables
    )
