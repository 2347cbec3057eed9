"""Model card: training data and settings, accuracy, privacy."""

import hashlib
import re

from flwr_distill.base.text import counted
from flwr_distill.server.export.description import Description
from flwr_distill.server.page.beyond_accuracy import BY_NODE, with_interval
from flwr_distill.server.page.method import disclosed, private_by_method
from flwr_distill.server.page.numbers import ACCURACY, accuracy_of, best, best_metric, score_of
from flwr_distill.server.page.privacy import of_whole_nodes, spent
from flwr_distill.server.page.run_files import RunFiles
from flwr_distill.server.page.words import METRIC_WORDS, percent, shown
from flwr_distill.task.datasets import DataSpec
from flwr_distill.task.datasets.types import PRIVATE
from flwr_distill.task.labels import positions

_MARKS = re.compile(r"[\\`*\[\]<>|]")
VALUES = {"image": "pixels in [0, 1]", "text": "token ids", "table": "values in float64"}


def model_card(run: RunFiles, file: str) -> str:
    """Card of a run's model, in Markdown; `file` is the model file next to it."""
    description = Description.of(run)
    spec = description.spec
    nodes = run.about["nodes"].values()
    samples = sum(node["samples"] or 0 for node in nodes)
    shape = " x ".join(map(str, spec.shape))
    return "\n".join(
        [
            f"# {run.title}",
            "",
            f"`{file}` is the global model after round {run.rows[-1]['round']} of run "
            f"{run.folder.name} ({run.about['started']}), trained by federated learning.",
            "",
            "## Use",
            f"- Input: float32 (n, {shape.replace(' x ', ', ')}), {VALUES[spec.kind]} less a mean "
            f"of {_scale(spec, spec.mean)}, divided by {_scale(spec, spec.std)}, for each channel.",
            *_columns(spec),
            f"- Output: logits (n, {spec.num_classes}), for the classes "
            f"{', '.join(map(_plain, description.classes))}{_by_position(spec)}.",
            f"- Label map: {spec.labels.digest}, a hash of all names in their order.",
            f"- Architecture: `{description.architecture}` of flwr-distill, for this input.",
            *_command(description, file),
            "",
            "## Data",
            f"- Data set: {run.settings['dataset']}, {spec.num_classes} classes, {shape}.",
            f"- {counted(len(nodes), 'node')} held {samples:,} training samples.",
            *_as_read(run),
            "",
            "## Accuracy",
            *_accuracy(run),
            "",
            "## Privacy",
            *_privacy(run),
            "",
            "## Settings",
            "The strategy, and settings that differ from the defaults:",
            "",
            *(f"- `{k} = {v!r}`" for k, v in run.changed_settings.items()),
            "",
            "## Versions",
            *(f"- {name} {version}" for name, version in run.about["versions"].items()),
            "",
        ]
    )


def _columns(spec: DataSpec) -> list[str]:
    names = ", ".join(map(_plain, spec.labels.columns))
    if not names:
        return []
    categories = "" if spec.name != PRIVATE else " `column=category` is 1 where it is so, else 0."
    return [f"- Columns, one a channel: {names}.{categories}"]


def _by_position(spec: DataSpec) -> str:
    is_named = spec.labels.classes != positions(spec.num_classes)
    return "" if is_named else ", which are positions: the data have no other names"


def _plain(name: str) -> str:
    """A name, which may be a node's, without a meaning in Markdown."""
    return _MARKS.sub(r"\\\g<0>", name)


def _as_read(run: RunFiles) -> list[str]:
    """Fingerprints of what was read; one for all nodes, each of which has its own in about.json."""
    lines = []
    if own := run.about.get("fingerprint"):
        lines.append(f"- Fingerprint of the data set on the server: {own}.")
    by_node = [
        node["fingerprint"] for node in run.about["nodes"].values() if node.get("fingerprint")
    ]
    if by_node:
        together = hashlib.sha256("".join(sorted(by_node)).encode()).hexdigest()[:32]
        nodes = counted(len(by_node), "node")
        lines.append(
            f"- Fingerprint of what {nodes} read: {together} (about.json has each node's, keyed by "
            "a secret of the node)."
        )
    return lines


def _command(description: Description, file: str) -> list[str]:
    samples = {"image": "image files", "table": "a table's rows"}.get(description.spec.kind)
    if samples is None:
        return []
    return [f"- Classes of {samples}: `flwr-distill predict {file} FILE...`"]


def _accuracy(run: RunFiles) -> list[str]:
    last, peak = run.rows[-1], best(run.rows)
    others = [*_chosen(run), *_others(run)]
    if not peak:
        return ["- Not measured: the server had no test samples, and nodes evaluated no model."]
    if last["accuracy"] is None:
        return [
            f"- {percent(accuracy_of(last))} on samples that nodes held out, mean over nodes "
            f"(highest in the run: {percent(accuracy_of(peak))}, after round {peak['round']}).",
            *others,
        ]
    lines = [
        f"- {percent(last['accuracy'])} on the server's test samples, loss {last['loss']:.3f} "
        f"(highest in the run: {percent(peak['accuracy'])}, after round {peak['round']})."
    ]
    by_class = enumerate(last.get("class_accuracy") or [])
    known = [
        f"{_plain(run.class_name(label))}: {percent(accuracy)}"
        for label, accuracy in by_class
        if accuracy is not None
    ]
    if known:
        lines.append(f"- By class: {', '.join(known)}.")
    return [*lines, *others]


def _chosen(run: RunFiles) -> list[str]:
    """The best round by another metric than accuracy."""
    metric = best_metric(run)
    if metric == ACCURACY or not (peak := best(run.rows, metric)):
        return []
    score = shown(metric, score_of(peak, metric))
    return [f"- Best by {METRIC_WORDS[metric]}: round {peak['round']}, {score}."]


def _others(run: RunFiles) -> list[str]:
    """Metrics besides accuracy, with 95 % intervals, and the confusion matrix."""
    last, lines = run.rows[-1], []
    nodes = last.get("node_scores") or {}
    of_nodes = f"samples that {nodes.get('nodes')} nodes held out ({nodes.get('samples')} count)"
    for row, what in ((last, "the server's test samples"), (nodes, of_nodes)):
        if row.get("balanced_accuracy") is None:
            continue
        metrics = (f"{METRIC_WORDS[m]} {with_interval(row, m)}" for m in BY_NODE)
        lines.append(f"- On {what}, with 95 % intervals: {', '.join(metrics)}.")
        if matrix := row.get("confusion"):
            rows = (f"{_plain(run.class_name(i))}: {counts}" for i, counts in enumerate(matrix))
            lines.append(f"- Predictions there by true class, in its order: {'; '.join(rows)}.")
    return lines


def _privacy(run: RunFiles) -> list[str]:
    train, epsilons = run.settings["train"], spent(run)
    by_method = private_by_method(run)
    if epsilons and (by_method or train.get("dp-noise")):
        by_node = ", ".join(f"{_plain(node)}: {e:.3g}" for node, e in epsilons.items())
        how = (
            "on virtual data from noisy class means"
            if by_method
            else f"DP-SGD, noise multiplier {train['dp-noise']:g}, gradients clipped to "
            f"{train['dp-clip']:g}"
        )
        lines = [
            f"- Trained with differential privacy of each sample: epsilon is at most "
            f"{max(epsilons.values()):.3g} at delta = {train['dp-delta']:g} ({how}). "
            f"By node: {by_node}."
        ]
        if whole := of_whole_nodes(run):
            lines.append(f"- {whole}")
    else:
        lines = [
            "- Trained without differential privacy: nothing bounds what the model reveals about "
            "single samples, and it was not tested for membership inference."
        ]
    if cosines := [cosine for *_, cosine in run.reported("highest-cosine")]:
        lines.append(
            f"- {counted(len(cosines), 'node')} sent virtual images to other nodes. The one most "
            f"like a real image of its node had a cosine of {max(cosines):.3f} (1 is a copy); the "
            "run's report has each node's privacy card."
        )
    if of_images := [epsilon for *_, epsilon in run.reported("virtual-epsilon")]:
        lines.append(
            f"- {counted(len(of_images), 'node')} sent virtual images to other nodes, made under "
            f"differential privacy with an epsilon of {max(of_images):g}."
        )
    if run.artifact("virtual.png"):
        lines.append("- The server also made virtual images from the nodes' messages.")
    if text := disclosed(run):
        lines.append(f"- {text}")
    return lines


def _scale(spec: DataSpec, values: tuple[float, ...]) -> str:
    """Means or deviations; of a table with all digits, for columns with a large offset."""
    return ", ".join(repr(value) if spec.kind == "table" else f"{value:g}" for value in values)
