"""`make gpu`: parts end in time and apart from each other; the kit has what a machine misses."""

import json
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from benchmarks.gpu_kit import __main__ as command
from benchmarks.gpu_kit import build
from benchmarks.gpu_kit.parts import PARTS, Part, Place
from benchmarks.gpu_kit.results import Results
from benchmarks.gpu_kit.runner import run_part

MACHINE = {"gpu": None, "driver": None, "cuda": None, "torch": "2", "python": "3", "cores": 2}
GPU_MACHINE = MACHINE | {"gpu": "NVIDIA Test", "driver": "driver 580"}


HERE = Place(True, Path("data"), Path("runs"))


def part(name, program, limit=60.0):
    """A part that runs a program; ``FILE`` in it is where its results go."""
    return Part(
        name,
        limit,
        lambda place, file: ["-c", program.replace("FILE", repr(str(file)))],
        lambda file: json.loads(file.read_text()),
        lambda figures: [f"{name} has {figures['value']}"],
    )


def writes(name, value=1, goals=(), then="", limit=60.0):
    figures = json.dumps({"value": value, "goals": list(goals)})
    return part(name, f"open(FILE, 'w').write({figures!r})\n{then}", limit)


@pytest.fixture
def gpu_kit(monkeypatch, tmp_path):
    """Run `make gpu` with other parts; returns its exit code and results."""

    def run(*parts, machine=MACHINE, chosen=()):
        monkeypatch.setattr(command, "PARTS", list(parts))
        monkeypatch.setattr(command, "read_machine", lambda: machine)
        words = ["gpu_kit", "--out", str(tmp_path), *(["--parts", *chosen] if chosen else [])]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            command.main()
        return int(ended.value.code), json.loads((tmp_path / "results.json").read_text())

    return run


def test_a_part_that_fails_hangs_or_writes_nothing_does_not_stop_the_others(gpu_kit, tmp_path):
    code, results = gpu_kit(
        writes("fails", then="raise SystemExit(3)"),
        writes("hangs", then="import time; time.sleep(60)", limit=2.0),
        part("silent", "print('nothing to say')"),
        part("damaged", "open(FILE, 'w').write('{')"),
        part("partial", "open(FILE, 'w').write('{\"other\": 1}')\nraise SystemExit(4)"),
        writes("works", 5),
    )
    findings = {name: each["result"] for name, each in results["parts"].items()}
    assert findings["works"] == "passed"
    assert findings["fails"] == "failed with exit code 3"
    assert findings["hangs"] == "stopped at its limit of 2 s"
    assert "no results" in findings["silent"]
    assert "cannot be read" in findings["damaged"]
    assert findings["partial"] == "failed with exit code 4"
    assert [results["parts"][name]["value"] for name in ("fails", "hangs", "works")] == [1, 1, 5]
    assert code == 1
    assert (tmp_path / "silent.log").read_text() == "nothing to say\n"
    page = (tmp_path / "results.md").read_text()
    assert "works has 5" in page
    assert "| hangs | stopped at its limit of 2 s |" in page


def test_a_part_at_its_limit_ends_with_the_processes_that_it_started(tmp_path):
    file = tmp_path / "child"
    child = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)"
    program = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        f"open({str(file)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)"
    )
    start = time.monotonic()
    run_part(part("parent", program, limit=2.0), HERE, tmp_path)
    assert time.monotonic() - start < 30
    with suppress(psutil.NoSuchProcess):  # a signal takes a moment on a busy machine
        psutil.Process(int(file.read_text())).wait(timeout=10)


def test_tests_that_a_limit_stops_are_counted_as_far_as_they_came(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.gpu_kit.runner.GRACE", 30.0)  # on a busy machine it takes long
    tests = tmp_path / "test_slow.py"
    tests.write_text(
        "import time\n\ndef test_a(): pass\n\ndef test_b(): assert 0\n\n"
        "def test_c(): time.sleep(60)\n"
    )
    (own,) = (part for part in PARTS if part.name == "tests")

    def command(place, file):
        return [*own.command(place, file)[:-3], "-p", "no:cacheprovider", str(tests)]

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in the background of a shell
    try:
        outcome = run_part(replace(own, limit=12.0, command=command), HERE, tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    assert outcome.result == "stopped at its limit of 12 s"
    assert [name.endswith("::test_a") for name in outcome.figures["passed"]] == [True]
    assert outcome.figures["failed"][0].endswith("::test_b")


def test_without_a_gpu_each_line_says_so(gpu_kit, capsys):
    code, _ = gpu_kit(writes("a", then="print('one')\nprint('two')"), chosen=["a"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("a,")]
    assert len(lines) == 4
    assert all("small version on the CPU" in line for line in lines)
    assert code == 0


def test_a_missed_goal_fails_the_run_on_a_gpu_and_is_shown(gpu_kit, tmp_path):
    goal = {"name": "speed", "measured": 2.0, "bound": "at least 5"}
    goal |= {"met": False, "verdict": "missed"}
    assert gpu_kit(writes("a", goals=[goal]))[0] == 0
    code, results = gpu_kit(writes("a", goals=[goal]), machine=GPU_MACHINE)
    assert code == 1
    assert results["goals"] == [{"part": "a", **goal}]
    assert "| speed | 2 | at least 5 | missed |" in (tmp_path / "results.md").read_text()


def test_results_of_parts_before_one_that_never_ends_are_kept(tmp_path):
    results = Results(tmp_path, MACHINE, "abc")
    first = writes("first")
    results.add(first, run_part(first, HERE, tmp_path))
    stored = json.loads((tmp_path / "results.json").read_text())
    assert stored["parts"]["first"]["value"] == 1
    assert stored["machine"]["commit"] == "abc"


def test_the_parts_fit_into_eight_minutes():
    assert [part.name for part in PARTS] == [
        *("doctor", "tests", "steps", "federation", "simulation", "paper")
    ]
    assert sum(part.limit for part in PARTS) == 8 * 60


@pytest.mark.parametrize("gpu", [False, True])
def test_every_part_runs_a_module_that_exists(gpu, tmp_path):
    place = Place(gpu, tmp_path, tmp_path)
    for each in PARTS:
        flag, name, *_ = each.command(place, tmp_path / "figures")
        if flag == "-m" and name != "pytest":
            assert find_spec(name) is not None


def test_the_kit_has_what_the_machine_misses_and_nothing_that_it_has():
    wheels = build.wheels()
    assert {"flwr", "cryptography", "pydantic", "opacus", "typer", "rich"} <= wheels.keys()
    assert wheels["protobuf"].startswith("6.")
    assert not {"torch", "numpy", "scipy", "triton", "grpcio", "ray", "uv"} & wheels.keys()
    assert not [name for name in wheels if name.startswith("nvidia")]


def test_data_that_are_missing_are_named_before_anything_is_written(monkeypatch, tmp_path, capsys):
    kit = tmp_path / "kit"
    words = ["build", "--data-root", str(tmp_path / "nothing"), "--kit", str(kit)]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit):
        build.main()
    assert "--data-root" in capsys.readouterr().err
    assert not kit.exists()
