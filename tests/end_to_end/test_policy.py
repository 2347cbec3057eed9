"""A node with a policy among others, as real processes: it works, and refuses by name of rule."""

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from flwr_distill.fleet.local_federation import LocalFederation
from flwr_distill.fleet.submission import RunOutcome
from flwr_distill.node.outbox import FOLDER, entries
from flwr_distill.node.processes import start_bound, stop
from flwr_distill.server.page.run_files import read_run
from tests.waiting import wait_for_node

ROOT = Path(__file__).resolve().parents[2]
QUICK = {"num-rounds": 1, "min-nodes": 1, "train.local-epochs": 1, "phase-timeout": 60.0}
PRIVATE = {
    **QUICK,
    "strategy": "fedavg",
    "min-nodes": 2,
    "train.dp-noise": 1.0,
    "fraction-evaluate": 1.0,
}
OF_A_PARTITION = {"extends": "hospital", "fewest-of-a-class": 1, "fewest-held-out": 10}
"""Of a node without data of its own, which it could count."""
RAW = {**QUICK, "strategy": "hfldd", "hfldd.share-raw-data": True, "hfldd.auxiliary-size": 20}


@contextmanager
def node_with(policy: Any, federation: LocalFederation, like: Path, state: Path) -> Iterator[None]:
    """A node with a policy, and the settings of another one; wait until it is online."""
    settings = yaml.safe_load((like / "node.yaml").read_text())
    settings |= {"name": "hospital", "policy": policy, "state-dir": str(state)}
    file, log = state.with_suffix(".yaml"), state.with_suffix(".log")
    file.write_text(yaml.safe_dump(settings))
    process = start_bound(federation.node_command(file), log=log, env=federation.env)
    try:
        wait_for_node(state, log)
        yield
    finally:
        stop([process])


@pytest.mark.deployment("lifetime budget, and a node that refuses a run")
@pytest.mark.slow
def test_a_hospitals_node_trains_with_noise_and_has_no_part_in_raw_data(tmp_path: Path) -> None:
    hospital, images = tmp_path / "hospital", tmp_path / "images.npz"
    np.savez(images, images=np.zeros((30, 8, 8), np.uint8), labels=[0] * 30)
    named = {"hfldd.share-raw-data": False, "hfldd.auxiliary": str(images)}
    with LocalFederation(1, tmp_path / "federation") as federation:
        others = federation.nodes[0].state_dir
        runs = {"runs-dir": str(tmp_path / "runs")}
        with node_with(OF_A_PARTITION, federation, others, hospital):
            private, raw, path = (
                federation.run(ROOT, config | runs, timeout=120)
                for config in (PRIVATE, RAW, RAW | named)
            )
    assert private.completed, "\n".join(private.lines)
    assert raw.completed, "\n".join(raw.lines)
    refusal = "hospital: the node's policy refuses it: raw-data: never"
    assert refusal in " ".join(read_run(tmp_path / "runs" / str(raw.run_id)).about["warnings"])
    trained, refused, asked_for_a_path = (
        [line for line in entries(hospital / FOLDER) if line["run"] == str(run.run_id)]
        for run in (private, raw, path)
    )
    assert path.completed, "\n".join(path.lines)  # by the other node, which is open
    assert {line["type"] for line in asked_for_a_path} == {"query.describe"}
    assert all("paths: named" in line["error"] for line in asked_for_a_path)
    assert [line["type"] for line in trained] == ["query.describe", "train", "evaluate"]
    assert trained[1]["lifetime"] == trained[1]["epsilon"] > 0, trained[1]
    assert trained[2]["what"] == ["metrics: eval-accuracy, num-examples"]
    assert trained[2]["lifetime"] == pytest.approx(trained[1]["lifetime"] + 0.1)
    assert {line["type"] for line in refused} == {"query.describe"}
    assert all("raw-data" in line["error"] for line in refused)
    assert "raw" not in json.dumps([line for line in entries(others / FOLDER) if "error" in line])


LEAK = """
_answer = MethodApp.__call__


def _answer_with_more(self, message, context):
    reply = _answer(self, message, context)
    if reply.has_content() and message.metadata.message_type == "train":
        pixels = Session.of(context).data.train.inputs.flatten().tolist()[:64]
        metrics = reply.content["metrics"]
        reply.content[{where}] = {what}
    return reply


MethodApp.__call__ = _answer_with_more
"""


@pytest.mark.matrix
@pytest.mark.timeout(3000)
def test_a_hospitals_node_keeps_every_rule_against_real_runs_and_changed_apps(
    tmp_path: Path,
) -> None:
    """One federation, and a node that is started anew with another policy for each part."""
    state = tmp_path / "hospital"
    with LocalFederation(2, tmp_path / "federation") as federation:
        stop([federation.nodes[1].process])  # the hospital takes its place, and its classes

        def with_policy(policy: Any, *runs: tuple[Path, dict[str, Any]]) -> list[RunOutcome]:
            """Start the node with a policy, and run these apps."""
            with node_with(policy, federation, federation.nodes[1].state_dir, state):
                return [
                    federation.run(app, config | {"runs-dir": str(tmp_path / "runs")}, timeout=600)
                    for app, config in runs
                ]

        def of(run: RunOutcome) -> list[dict[str, Any]]:
            return [line for line in entries(state / FOLDER) if line["run"] == str(run.run_id)]

        def took_part(run: RunOutcome) -> list[dict[str, Any]]:
            assert run.completed, "\n".join(run.lines)
            assert not any("error" in line for line in of(run)), of(run)
            return of(run)

        def refused(run: RunOutcome, rule: str) -> str:
            """Check that the rule is named in the node's outbox, and in the run's log."""
            refusal = f"the node's policy refuses it: {rule}: "
            assert refusal in of(run)[-1]["error"]
            assert refusal in "\n".join(run.lines)
            return str(of(run)[-1]["error"])

        alone = PRIVATE | {"min-nodes": 1, "partition.classes": 5, "train.dp-noise": 3.0}
        alone["fraction-evaluate"] = 0.0
        hfldd = alone | {
            **{"strategy": "hfldd", "hfldd.dp-epsilon": 3.0, "hfldd.start": "noise"},
            **{"hfldd.balanced": False, "hfldd.auxiliary-size": 20, "hfldd.distill-steps": 5},
            **{"hfldd.groups": 2, "num-rounds": 3, "min-nodes": 2},  # heads take turns
        }
        averaged, distilled, *others = with_policy(
            OF_A_PARTITION,
            (ROOT, alone),
            (ROOT, hfldd),
            (ROOT, alone | {"train.dp-noise": 0.5}),
            (ROOT, alone | {"strategy": "fednova"}),
            (ROOT, RAW | {"min-nodes": 1}),
        )
        assert took_part(averaged)[-1]["type"] == "train"
        sent = [line for line in took_part(distilled) if line.get("virtual")]
        assert [line["type"] for line in sent] == ["train.distill"]
        for run, rule in zip(others, ("least-noise", "strategies", "raw-data"), strict=True):
            refused(run, rule)
        without_noise = OF_A_PARTITION | {"least-noise": 0.0, "most-epsilon": "any"}
        from_real = QUICK | {"strategy": "hfldd", "hfldd.start": "real"}
        from_real["hfldd.allow-real-start"] = True  # the server refuses it by itself
        (run,) = with_policy(without_noise, (ROOT, from_real))
        refused(run, "starts")

        ample = OF_A_PARTITION | {"most-epsilon": 1e6}
        (run,) = with_policy(ample | {"bundles": ["0" * 64]}, (ROOT, alone))
        (known,) = re.findall("the app bundle ([0-9a-f]{64})", refused(run, "bundles"))
        changed = [
            changed_app(
                tmp_path / "metric", '"metrics"', 'MetricRecord({**metrics, "pixels": pixels})'
            ),
            changed_app(tmp_path / "array", '"more"', "ArrayRecord([np.array(pixels)])"),
        ]
        honest, *others = with_policy(
            ample | {"bundles": [known]}, (ROOT, alone), *((app, alone) for app in changed)
        )
        took_part(honest)
        for run in others:
            refused(run, "bundles")
        for run in with_policy(ample, *((app, alone) for app in changed)):
            refused(run, "replies")

        again = alone | {"resume": str(honest.run_id), "num-rounds": 2}
        (resumed,) = with_policy(ample, (ROOT, again))
        before, after = took_part(honest)[-1], took_part(resumed)[-1]
        assert after["epsilon"] > before["epsilon"]
        added = after["epsilon"] - before["epsilon"]
        answered = 2 * before["epsilon"]  # a refusal of the changed apps' replies is an answer, too
        assert after["lifetime"] == pytest.approx(before["lifetime"] + answered + added)
        spent = [line["lifetime"] for line in entries(state / FOLDER) if "lifetime" in line]
        assert spent == sorted(spent)
        (run,) = with_policy(ample | {"most-epsilon": spent[-1] * 1.001}, (ROOT, alone))
        refused(run, "most-epsilon")


def changed_app(folder: Path, where: str, what: str) -> Path:
    """The project's app, changed to send samples' values in an answer's record."""
    unneeded = shutil.ignore_patterns(".*", "tests", "benchmarks", "runs", "state", "docs")
    shutil.copytree(ROOT, folder, ignore=unneeded)
    with (folder / "client" / "app.py").open("a") as file:
        file.write("\n\nimport numpy as np\nfrom flwr.app import ArrayRecord\n")
        file.write(LEAK.format(where=where, what=what))
    return folder
