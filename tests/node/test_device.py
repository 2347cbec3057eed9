"""Which device a node takes, and what it says of a GPU that CUDA cannot use. The GPUs are fakes."""

import fcntl
import logging
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.common.logger import FLOWER_LOGGER

from flwr_distill.node import device
from flwr_distill.node.device import UnfitError, claim, take_device
from flwr_distill.node.settings import load_settings
from flwr_distill.node.supervisor import Node

OLD_DRIVER = "The NVIDIA driver on your system is too old (found version 12040). Please update ..."
OLD_GPU = "CUDA error: no kernel image is available for execution on the device\nCUDA kernel ..."

HOLD = """
import sys, time
from pathlib import Path
from flwr_distill.node.device import claim
chosen, claimed = claim(sys.argv[2:], Path(sys.argv[1]))
print(chosen, flush=True)
time.sleep(60)
"""


@dataclass(frozen=True)
class Gpu:
    """A GPU that NVML counts; `fault` is what CUDA says when something is to be computed on it."""

    uuid: str
    fault: str = ""
    name: str = "NVIDIA H100 80GB HBM3"
    major: int = 9
    minor: int = 0
    total_memory: int = 80 * 2**30


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Gives this process GPUs."""

    def have(*gpus: Gpu) -> None:
        def properties(number: int) -> Gpu:
            if gpus[number].fault == OLD_DRIVER:
                raise RuntimeError(OLD_DRIVER)
            return gpus[number]

        def ones(size: int, *, device: str) -> torch.Tensor:
            if fault := gpus[int(device.removeprefix("cuda:"))].fault:
                raise torch.AcceleratorError(fault)
            return torch.zeros(size)

        def capability(number: int) -> tuple[int, int]:
            return properties(number).major, properties(number).minor

        monkeypatch.setattr(torch, "ones", ones)
        replaced = {
            "device_count": lambda: len(gpus),
            "set_device": properties,
            "get_device_properties": properties,
            "get_device_capability": capability,
            "get_arch_list": lambda: ["sm_75", "sm_90"],
        }
        for name, value in replaced.items():
            monkeypatch.setattr(torch.cuda, name, value)

    return have


Machine = Callable[..., None]


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(FLOWER_LOGGER, "propagate", True)
    caplog.set_level(logging.INFO)
    return caplog


def test_nodes_of_one_machine_spread_over_its_gpus(machine: Machine, tmp_path: Path) -> None:
    machine(Gpu("a"), Gpu("b"), Gpu("c"))
    nodes = [take_device(name, folder=tmp_path) for name in ("cuda:0", *["auto"] * 4, "cuda")]
    assert [node.name for node in nodes] == ["cuda:0", "cuda:1", "cuda:2"] * 2


def test_containers_that_see_no_others_claims_take_gpus_by_their_place(
    machine: Machine, tmp_path: Path
) -> None:
    machine(Gpu("a"), Gpu("b"))
    containers = [tmp_path / str(place) for place in range(4)]
    taken = [take_device("cuda", place=n, folder=own) for n, own in enumerate(containers)]
    assert [device.name for device in taken] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]


def test_the_place_of_a_node_is_its_partition() -> None:
    for settings, place in (({"partition_id": 3, "num_partitions": 4}, "3"), ({}, "0")):
        command = Node(load_settings(None, settings))._executor_command(1, 6, 5)
        assert command[command.index("--place") + 1] == place


def test_processes_that_number_the_same_gpus_differently_do_not_mix_them_up(
    machine: Machine, tmp_path: Path
) -> None:
    machine(Gpu("a"), Gpu("b"))
    first = take_device("cuda", folder=tmp_path)
    machine(Gpu("b"), Gpu("a"))  # CUDA_VISIBLE_DEVICES=1,0
    assert (first.name, take_device("cuda:1", folder=tmp_path).name) == ("cuda:0", "cuda:1")
    machine(Gpu("a"), Gpu("b"))  # the first is held twice
    assert take_device("cuda", folder=tmp_path).name == "cuda:1"


def test_a_gpu_that_cuda_cannot_use_makes_a_node_unfit_and_the_reason_says_what_is_needed(
    machine: Machine, tmp_path: Path
) -> None:
    machine(Gpu("a", OLD_GPU, "NVIDIA GeForce GTX 1080", 6, 1, 8 * 2**30))
    with pytest.raises(UnfitError) as error:
        take_device("cuda:0", folder=tmp_path)
    for part in (
        "NVIDIA GeForce GTX 1080, 8.0 GiB, sm_61: CUDA error: no kernel image",
        f"PyTorch {torch.__version__}",
        "code for sm_75 sm_90",
        "use device=cpu",
    ):
        assert part in str(error.value)


def test_a_driver_that_is_too_old_makes_a_node_unfit_and_the_reason_names_one_that_is_not(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(Gpu("a", OLD_DRIVER), Gpu("b", OLD_DRIVER))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(UnfitError, match=r"too old \(found version 12040\).*driver 580 or later"):
        take_device("cuda", folder=tmp_path)


def test_auto_takes_the_cpu_with_a_warning_where_no_gpu_can_be_used(
    machine: Machine, tmp_path: Path, logged: Any
) -> None:
    machine(Gpu("a", OLD_DRIVER))
    assert take_device("auto", folder=tmp_path).name == "cpu"
    (record,) = logged.records
    assert record.levelno == logging.WARNING
    assert "device=auto takes the CPU: cuda:0: CUDA cannot use" in record.getMessage()


def test_a_gpu_that_works_is_found_beside_one_that_does_not_and_logged_with_its_memory(
    machine: Machine, tmp_path: Path, logged: Any
) -> None:
    machine(Gpu("a", OLD_GPU), Gpu("b"))
    assert take_device("auto", folder=tmp_path).name == "cuda:1"
    assert logged.messages == ["Device cuda:1: NVIDIA H100 80GB HBM3, 80.0 GiB"]
    assert take_device("auto", folder=tmp_path).name == "cuda:1"


@pytest.mark.parametrize("setting", ["cuda", "cuda:2"])
def test_a_gpu_that_is_not_there_makes_a_node_unfit(
    machine: Machine, tmp_path: Path, setting: str
) -> None:
    machine(*[Gpu("a"), Gpu("b")][: 2 if setting == "cuda:2" else 0])
    with pytest.raises(UnfitError, match=rf"device={setting}: this machine has \d CUDA devices"):
        take_device(setting, folder=tmp_path)


def test_claims_that_cannot_be_kept_are_said_with_a_remedy(
    machine: Machine, tmp_path: Path
) -> None:
    machine(Gpu("a"))
    (tmp_path / "file").touch()
    with pytest.raises(UnfitError, match="set TMPDIR to a folder of your own"):
        take_device("cuda", folder=tmp_path / "file")


def test_gpus_are_not_claimed_in_a_folder_that_others_can_write(tmp_path: Path) -> None:
    """Anyone may make it first in the system's temporary folder."""
    own, elsewhere = tmp_path / "own", tmp_path / "elsewhere"
    claim(["a"], own / "gpus")[1].close()
    for path in (own, own / "gpus"):
        path.chmod(0o777)
        with pytest.raises(OSError, match="other users can write"):
            claim(["a"], own / "gpus")
        path.chmod(0o700)
    elsewhere.mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(elsewhere)
    with pytest.raises(OSError, match="not a folder of this user"):
        claim(["a"], tmp_path / "link" / "gpus")
    assert not list(elsewhere.iterdir())


def test_an_app_without_pytorch_is_not_made_to_wait_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    assert take_device("auto", folder=tmp_path).name == "auto"
    assert "torch" not in sys.modules


def test_processes_that_start_at_once_share_gpus_evenly_and_the_dead_hold_none(
    tmp_path: Path,
) -> None:
    gpus = ["a", "b", "c"]
    command = [sys.executable, "-c", HOLD, str(tmp_path), *gpus]
    nodes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    try:
        chosen = [str(node.stdout and node.stdout.readline()).strip() for node in nodes]
        assert sorted(chosen) == sorted(gpus * 2)
        dead = chosen.index("c")
        nodes[dead].kill()
        nodes[dead].wait()
        assert claim(gpus, tmp_path)[0] == "c"
        assert len(list(tmp_path.glob("*.claim"))) == 6  # the dead one's is gone
    finally:
        for node in nodes:
            node.kill()
            node.communicate()


def test_a_process_that_holds_the_lock_of_claims_for_good_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "TURN_TIMEOUT", 0.1)
    with (tmp_path / "lock").open("ab") as stuck:
        fcntl.flock(stuck, fcntl.LOCK_EX)
        with pytest.raises(OSError, match="another process keeps it locked"):
            claim(["a"], tmp_path)
