"""A node with a policy among others, as real processes: it works, and refuses by name of rule."""

import json
import time
from pathlib import Path

import pytest
import yaml

from fleet.local_federation import LocalFederation
from node.outbox import FOLDER, entries
from node.processes import start_bound, stop
from node.supervisor import status_file
from server.page import read_run

ROOT = Path(__file__).resolve().parents[2]
QUICK = {"num-rounds": 1, "min-nodes": 1, "train.local-epochs": 1, "phase-timeout": 60.0}
PRIVATE = {**QUICK, "strategy": "fedavg", "min-nodes": 2, "train.dp-noise": 1.0}
RAW = {**QUICK, "strategy": "hfldd", "hfldd.share-raw-data": True, "hfldd.auxiliary-size": 20}


@pytest.mark.slow
def test_a_hospitals_node_trains_with_noise_and_has_no_part_in_raw_data(tmp_path: Path) -> None:
    with LocalFederation(1, tmp_path / "federation") as federation:
        others = federation.nodes[0].state_dir
        hospital = tmp_path / "hospital"
        settings = yaml.safe_load((others / "node.yaml").read_text())
        settings |= {"name": "hospital", "policy": "hospital", "state-dir": str(hospital)}
        (tmp_path / "node.yaml").write_text(yaml.safe_dump(settings))
        process = start_bound(
            federation.node_command(tmp_path / "node.yaml"),
            log=tmp_path / "hospital.log",
            env=federation.env,
        )
        try:
            while not online(hospital):
                assert process.poll() is None, (tmp_path / "hospital.log").read_text()
                time.sleep(0.1)
            runs = {"runs-dir": str(tmp_path / "runs")}
            private = federation.run(ROOT, PRIVATE | runs, timeout=120)
            raw = federation.run(ROOT, RAW | runs, timeout=120)
        finally:
            stop([process])
    assert private.completed, "\n".join(private.lines)
    assert raw.completed, "\n".join(raw.lines)
    refusal = "hospital: the node's policy refuses it: raw-data: never"
    assert refusal in " ".join(read_run(tmp_path / "runs" / str(raw.run_id)).about["warnings"])
    trained, refused = (
        [line for line in entries(hospital / FOLDER) if line["run"] == str(run.run_id)]
        for run in (private, raw)
    )
    assert [line["type"] for line in trained] == ["query.describe", "train"]
    assert trained[1]["lifetime"] == trained[1]["epsilon"] > 0, trained[1]
    assert {line["type"] for line in refused} == {"query.describe"}
    assert all("raw-data" in line["error"] for line in refused)
    assert "raw" not in json.dumps([line for line in entries(others / FOLDER) if "error" in line])


def online(state_dir: Path) -> bool:
    file = status_file(state_dir)
    return file.exists() and "online" in json.loads(file.read_text())
