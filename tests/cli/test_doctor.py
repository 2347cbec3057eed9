"""`flwr-distill doctor`: what it finds on this machine, and on machines that are made up."""

import importlib.metadata
import json

import pytest
import torch
from packaging.requirements import Requirement
from typer.testing import CliRunner

import flwr_distill.fleet.checkup
import flwr_distill.flower.lines
from flwr_distill.cli.main import app
from flwr_distill.fleet.checkup import checkup
from flwr_distill.fleet.local_federation import free_ports
from flwr_distill.flower.lines import FOLDERS
from flwr_distill.node.settings import load_settings


@pytest.fixture(autouse=True)
def ports(monkeypatch):
    """Ports in place of the default ones, which another test may use."""
    *server, peer = free_ports(4)
    monkeypatch.setattr(flwr_distill.fleet.checkup, "SERVER_PORTS", dict.fromkeys(server, "an API"))
    monkeypatch.setattr(flwr_distill.fleet.checkup, "PEER_PORT", peer)
    return [*server, peer]


@pytest.fixture
def no_gpu():
    if torch.cuda.device_count():
        pytest.skip("this machine has a GPU")


@pytest.fixture
def driver_file(monkeypatch, tmp_path):
    def write(text):
        (tmp_path / "version").write_text(text)
        monkeypatch.setattr(flwr_distill.fleet.checkup, "DRIVER_FILE", tmp_path / "version")

    return write


def doctor(*arguments):
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)])


def findings(**settings):
    return {finding.check: finding for finding in checkup(load_settings(None, settings))}


@pytest.mark.usefixtures("no_gpu")
def test_a_machine_without_a_gpu_is_fit_and_told_what_was_looked_at(tmp_path, ports):
    result = doctor("--state-dir", tmp_path)
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    states = {line[1] if line[1] != "port" else line[2]: line[0] for line in lines}
    names = ["software", "machine", "driver", "GPUs", "state-dir", "temporary", "proxy"]
    names += map(str, ports)
    assert states == dict.fromkeys(names, "ok") | {"SuperLink": "unchecked"}
    assert f"PyTorch {torch.__version__}" in result.stdout
    assert "none: nodes compute on the CPU" in result.stdout


@pytest.mark.parametrize("version", ["1.31.0", "1.33.0", "1.43.0"])
def test_a_flower_on_which_nodes_keep_no_policy_fails_with_its_version_and_the_remedy(
    monkeypatch, version
):
    monkeypatch.setattr(flwr_distill.flower.lines, "version", lambda name: version)
    results = findings()["software"]
    assert results.state == "failed"
    assert version in results.found + results.remedy
    assert "flwr==1.32.1" in results.remedy


def test_a_flower_on_which_they_keep_one_passes(monkeypatch):
    monkeypatch.setattr(flwr_distill.flower.lines, "version", lambda name: "1.42.0")
    assert findings()["software"].state == "ok"


def test_only_a_flower_that_the_commands_work_with_is_installed():
    (flwr,) = [
        requirement
        for text in importlib.metadata.requires("flwr-distill") or ()
        if (requirement := Requirement(text)).name == "flwr" and not requirement.extras
    ]
    served = [f"{line}.{patch}" for line in FOLDERS for patch in (1, 9)]
    assert all(flwr.specifier.contains(version) for version in served)
    others = ("1.31.0", "1.32.0", "1.33.0", "1.34.0", "1.43.0", "2.0.0")
    assert not any(flwr.specifier.contains(version) for version in others)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("device", ["cuda", "cuda:3"])
def test_a_gpu_that_is_asked_for_and_missing_fails(device):
    result = doctor("--device", device)
    assert result.exit_code == 1
    assert f"device={device}, but this machine has 0 CUDA devices" in result.stdout
    assert "no NVIDIA driver is loaded" in result.stdout


def test_findings_are_json_on_request_and_the_exit_status_is_the_same(ports):
    result = doctor("--json", "--device", "gpu")
    assert result.exit_code == 1
    results = {each["check"]: each for each in json.loads(result.stdout)}
    assert results["settings"]["state"] == "failed"
    assert "device = 'gpu'" in results["settings"]["found"]
    assert results["software"]["state"] == "ok"
    assert results["temporary"]["numbers"]["free (bytes)"] > 0


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19", "failed"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.82.07  Wed Aug 27", "ok"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release", "ok"),
        ("something else", "unchecked"),
    ],
)
def test_a_driver_that_this_pytorch_cannot_use_is_named_with_one_that_it_can(
    driver_file, monkeypatch, text, state
):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    driver_file(f"{text}\nGCC version: gcc version 12.2.0")
    results = findings()["driver"]
    assert results.state == state
    if state == "failed":
        assert "535.104.05 is too old" in results.found
        assert results.remedy == "install NVIDIA's driver 580 or later"


def test_a_gpu_that_cuda_cannot_use_fails_with_the_reason_even_where_auto_takes_the_cpu(
    monkeypatch,
):
    reason = "CUDA cannot use this machine's GPUs: the driver is too old"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(flwr_distill.fleet.checkup, "why_unusable", lambda number: reason)
    results = findings(device="auto")["cuda:0"]
    assert (results.state, results.found) == ("failed", reason)
    assert "update the driver" in results.remedy


def test_a_folder_without_room_or_leave_to_write_fails(monkeypatch, tmp_path):
    monkeypatch.setattr(flwr_distill.fleet.checkup, "MIN_SPACE", 2**70)
    results = findings(state_dir=tmp_path / "not" / "yet")
    assert (
        "make room for 1 GiB, or name another folder with --state-dir"
        in results["state-dir"].remedy
    )
    assert results["temporary"].state == "failed"
    monkeypatch.setattr(flwr_distill.fleet.checkup.os, "access", lambda *_: False)
    assert findings(state_dir=tmp_path)["state-dir"].found == f"{tmp_path} cannot be written to"
