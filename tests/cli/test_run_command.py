"""`flwr-distill run`: ends as the run does, and follows it through the SuperLink's restarts."""

import json

import pytest
from typer.testing import CliRunner

import cli.run
import fleet.registration
from cli.main import app
from fleet.certificates import CertificateFolder
from fleet.submission import RunError, RunOutcome

SUMMARY = {
    "strategy": "hfldd",
    "accuracy": 0.942,
    "rounds": 4,
    "server_bytes": 3_450_000,
    "link_bytes": 30_000,
    "seconds": 24.4,
}


class Answering:
    """A SuperLink that says how run 7 fares, one word after the other."""

    said: list[str]

    def __init__(self, address, root_certificates):
        assert address == "127.0.0.1:9093"

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def wait(self, timeout):
        pass

    def run_status(self, run_id):
        assert run_id == 7
        return self.said.pop(0)


@pytest.fixture
def folder(tmp_path):
    CertificateFolder(tmp_path).create(5)
    (tmp_path / "runs" / "7").mkdir(parents=True)
    (tmp_path / "runs" / "7" / "summary.json").write_text(json.dumps(SUMMARY))
    return tmp_path


@pytest.fixture
def invoke(folder, monkeypatch):
    """Run the command with a SuperLink that ends the run's log with these words."""
    followed = []

    def run(*said, error=None):
        def submit(app_dir, connection, run_config, *, on_line, **more):
            assert (app_dir / "pyproject.toml").exists()
            assert run_config == "num-rounds=3"
            if error:
                raise error
            on_line("round 1/3")
            return RunOutcome(7, said[0], [])

        Answering.said = list(said[1:])
        monkeypatch.setattr(fleet.registration, "SecureControl", Answering)
        monkeypatch.setattr(cli.run, "submit", submit)
        monkeypatch.setattr(cli.run.subprocess, "run", lambda c, **_: followed.append(c))
        where = ("--root-certificates", folder / "ca.crt", "--runs-dir", folder / "runs")
        arguments = ["run", "-c", "num-rounds=3", *map(str, where)]
        return CliRunner().invoke(app, arguments), followed

    return run


def test_a_run_that_completes_ends_with_its_table(invoke):
    result, followed = invoke("finished:completed")
    assert result.exit_code == 0, result.output
    assert "round 1/3" in result.stdout
    for number in ("hfldd", "94.2%", "3.45", "0.030", "24"):
        assert number in result.stdout
    assert followed == []


def test_a_run_that_fails_ends_with_1(invoke):
    result, _ = invoke("finished:failed")
    assert result.exit_code == 1
    assert "run 7 ended as finished:failed" in result.stderr


def test_a_run_whose_log_breaks_off_is_followed_until_it_has_finished(invoke):
    result, followed = invoke("running", "running", "finished:completed")
    assert result.exit_code == 0, result.output
    assert [command[:3] for command in followed] == [["flwr", "log", "7"]] * 2


def test_a_run_that_is_not_accepted_says_why(invoke):
    result, _ = invoke("", error=RunError("the run was not accepted: num-rounds"))
    assert result.exit_code == 1
    assert "flwr-distill run: the run was not accepted: num-rounds" in result.stderr


def test_a_superlink_that_does_not_answer_is_said_in_one_line(folder):
    where = ("--superlink", "127.0.0.1:9", "--root-certificates", str(folder / "ca.crt"))
    result = CliRunner().invoke(app, ["run", *where, "--timeout", "0"])
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "no SuperLink answers at superlink=127.0.0.1:9 within 0 s" in result.stderr
