"""`flwr-distill run`: finds its SuperLink, refuses bad settings first, and ends as the run does."""

import json
import re
import shlex
from itertools import chain
from pathlib import Path

import pytest
from rich.console import Console

import flwr_distill.cli.run
from flwr_distill.cli.run_log import RunLog
from flwr_distill.fleet.federation_record import FederationFile, FederationRecord
from flwr_distill.fleet.run_config import RunConfigError, read_run_config
from flwr_distill.fleet.submission import RunError, RunOutcome

from .commands import assert_refused, command

SUMMARY = {
    "strategy": "hfldd",
    "accuracy": 0.942,
    "rounds": 4,
    "server_bytes": 3_450_000,
    "link_bytes": 30_000,
    "seconds": 24.4,
}
CRASH = """\
\x1b[91mERROR \x1b[0m:     ServerApp raised an exception
Traceback (most recent call last):
  File "server/app.py", line 33, in main
    settings.check()
{error}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with the results of run 7."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "7").mkdir(parents=True)
    (tmp_path / "runs" / "7" / "summary.json").write_text(json.dumps(SUMMARY))
    return tmp_path


@pytest.fixture
def up(folder):
    """A federation of three nodes runs in the state directory, as far as its record says."""
    file = FederationFile(folder / "state" / "local")
    file.lock()
    nodes = [f"node-{i}" for i in range(3)]
    file.write(FederationRecord(1, "127.0.0.1:1234", "home", nodes, str(folder)))
    yield
    file.unlock()


@pytest.fixture
def invoke(folder, monkeypatch):
    """Run the command with a run that ends in this way, after these lines of its log."""
    submitted = []

    def run(*arguments, status="finished:completed", details="", lines=(), error=None):
        def submit(app_dir, run_config, *, control, on_line):
            assert (app_dir / "pyproject.toml").exists()
            submitted.append(run_config)
            if error:
                raise error
            for line in chain(["started run 7"], lines):
                on_line(line)
            return RunOutcome(7, status, [], details)

        monkeypatch.setattr(flwr_distill.cli.run, "submit", submit)
        return command("run", *arguments)

    run.submitted = submitted
    return run


def test_a_run_on_the_local_federation_needs_no_options_and_ends_with_its_table(invoke, up, folder):
    result = invoke(lines=["INFO :      round   1/3  accuracy", f"Results in {folder}/runs/7"])
    assert result.exit_code == 0, result.output
    assert invoke.submitted == [{"min-nodes": 3}]
    assert "round   1/3" in result.stdout
    for number in ("hfldd", "94.2 %", "3.45", "0.030", "24"):
        assert number in result.stdout


def test_a_log_as_json_is_shown_as_text_without_lines_about_single_messages(invoke, up, folder):
    lines = [
        json.dumps({"level": "WARNING", "text": "1 node failed in train"}),
        json.dumps({"level": "INFO", "text": "train, node-0: sent", "message_id": "ab"}),
        json.dumps({"level": "INFO", "text": f"Results in {folder}/runs/7"}),
    ]
    result = invoke(lines=lines)
    assert "warning: 1 node failed in train\n" in result.stdout
    assert "node-0" not in result.stdout
    assert "94.2 %" in result.stdout


def test_nodes_with_data_of_their_own_do_not_run_the_default_data_set(invoke, up, folder):
    (folder / "node-1").mkdir()
    (folder / "node-1" / "node-config.toml").write_text('data = "/ward"\n')
    assert_refused(invoke(), 'dataset="private"')
    assert not invoke.submitted
    assert invoke("-c", 'dataset="private"').exit_code == 0
    assert invoke("-c", 'dataset="digits"').exit_code == 0


def test_results_are_shown_from_where_they_are_seen_here(invoke, up, folder):
    result = invoke("--runs-dir", folder / "runs", lines=["Results in /elsewhere/7"])
    assert "94.2 %" in result.stdout
    result = invoke(lines=["Results in /elsewhere/7"])
    assert result.exit_code == 0
    assert "with the server, in /elsewhere/7" in result.stdout


def test_presets_files_and_texts_add_up_and_the_last_counts(invoke, up, folder):
    (folder / "mine.toml").write_text("num-rounds = 4\n[train]\nlr = 0.5\n")
    preset = ("--preset", "hfldd-mnist")
    texts = ("-c", "mine.toml", "-c", "num-rounds=5 strategy='fedavg' min-nodes=2")
    assert invoke(*preset, *texts).exit_code == 0
    (overrides,) = invoke.submitted
    assert overrides["train.lr"] == 0.5
    assert overrides["num-rounds"] == 5
    assert overrides["strategy"] == "fedavg"
    assert overrides["min-nodes"] == 2
    assert overrides["hfldd.distilled-size"] == 400


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (("-c", "train.lrr=0.1"), "train.lrr: is not a known key (did you mean train.lr?"),
        (("-c", "lr=0.1"), "lr: is not a known key (did you mean train.lr?"),
        (("-c", "train.mom=0.1"), "train.mom: is not a known key (did you mean train.momentum?"),
        (("-c", "trian.lr=0.1"), "trian.lr: is not a known key (did you mean train.lr?"),
        (("-c", "train.lr=-1"), "train.lr = -1"),
        (("-c", "strategy=fedavg"), 'strategy="fedavg"'),
        (("-c", "num-rounds 3"), "num-rounds 3"),
        (("-c", "train.lr=[1]"), "train.lr"),
        (("-c", "nowhere.toml"), "nowhere.toml"),
        (("--preset", "hfldd-mnist-c3"), "preset = 'hfldd-mnist-c3': is not one of"),
    ],
)
def test_a_bad_setting_is_one_line_before_anything_is_submitted(invoke, given, reason):
    assert_refused(invoke(*given), reason)
    assert invoke.submitted == []


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ('strategy="hflddd"', ["strategy = 'hflddd'", "did you mean hfldd"]),
        ('strategy="hfldd" aggregator="krun"', ["aggregator = 'krun'", "krum"]),
        ('runs-dir="{folder}/file/runs"', ["runs-dir = ", "{folder}/file"]),
        ('runs-dir="file"', ["runs-dir = 'file'", "{folder}/file"]),
    ],
)
def test_what_the_servers_own_machine_can_know_is_said_before_anything_is_submitted(
    invoke, up, folder, given, reason
):
    (folder / "file").write_text("no folder")
    assert_refused(
        invoke("-c", given.format(folder=folder)), *(text.format(folder=folder) for text in reason)
    )
    assert invoke.submitted == []


def test_what_only_another_machine_can_know_is_left_to_it(invoke, folder):
    elsewhere = ("--superlink", "server.example:9093", "--insecure")
    assert invoke("-c", 'strategy="acme" runs-dir="/proc/acme"', *elsewhere).exit_code == 0
    assert len(invoke.submitted) == 1


def test_a_relative_runs_dir_is_below_the_folder_where_the_federation_runs(
    invoke, up, folder, monkeypatch
):
    (folder / "file").write_text("no folder")
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    where = ("--state-dir", folder / "state" / "local")
    assert "runs-dir" in invoke("-c", 'runs-dir="file"', *where).stderr
    monkeypatch.chdir(folder)
    assert invoke("-c", 'runs-dir="elsewhere/file"').exit_code == 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ((), "start one with `flwr-distill up`"),
        (("--superlink", "a:1"), "root-certificates = 'certs/ca.crt'"),
        (("--insecure", "--root-certificates", "ca.crt"), "exclude each other"),
    ],
)
def test_a_superlink_is_local_or_named_with_tls_or_without(invoke, folder, options, reason):
    (folder / "ca.crt").touch()
    assert_refused(invoke(*options), reason)
    assert invoke.submitted == []


def test_a_superlink_that_does_not_answer_is_one_line(folder):
    where = ("--superlink", "127.0.0.1:9", "--insecure", "--timeout", "0")
    assert_refused(command("run", *where), "127.0.0.1:9")


def test_a_run_that_is_refused_or_stopped_ends_with_1(invoke, up):
    assert_refused(invoke(error=RunError("not accepted: no space")), "not accepted: no space")
    assert_refused(invoke(status="finished:stopped"), "flwr-distill run: run 7 was stopped")


def failed(invoke, error, details):
    reason = f"ServerApp failed with exception: {details}"
    lines = CRASH.format(error=error).splitlines()
    return invoke(status="finished:failed", details=reason, lines=lines)


def test_our_error_is_one_line_and_a_mistake_in_the_code_has_its_traceback(invoke, up):
    result = failed(invoke, "task.errors.SettingsError: x = 1: take 2", "x = 1: take 2")
    assert_refused(result, "flwr-distill run: run 7 failed: x = 1: take 2")
    assert "Traceback" not in result.output
    result = failed(invoke, "KeyError: 'lr'", "'lr'")
    assert result.stderr == "flwr-distill run: run 7 failed: KeyError: 'lr'\n"
    assert 'File "server/app.py", line 33' in result.stdout


def test_ctrl_c_leaves_the_run_to_itself_and_says_so(invoke, up):
    result = invoke(error=KeyboardInterrupt())
    assert result.exit_code == 130

    def interrupts():
        yield "INFO :      round   0/3"
        raise KeyboardInterrupt

    result = invoke(lines=interrupts())
    assert result.exit_code == 130
    assert "run 7 continues; `flwr-distill stop 7` stops it" in result.stderr


@pytest.mark.parametrize(
    "options",
    [
        ("--superlink", "fl.example.org:9093", "--insecure"),
        ("--superlink", "fl.example.org:9093", "--root-certificates", "our ca.crt"),
        ("--state-dir", "the other"),
    ],
)
def test_after_ctrl_c_the_command_that_stops_the_run_reaches_its_superlink(invoke, up, options):
    Path("our ca.crt").touch()
    Path("state", "local").rename("the other")

    def interrupts():
        yield "INFO :      round   0/3"
        raise KeyboardInterrupt

    result = invoke(*options, lines=interrupts())
    assert f"`flwr-distill stop 7 {shlex.join(options)}` stops it" in result.stderr


def shown(*lines, terminal=False):
    console = Console(force_terminal=terminal, width=60, record=True, color_system="standard")
    with RunLog(console) as log:
        for line in lines:
            log.show(line)
    return console.export_text(styles=terminal)


def test_the_log_has_rounds_and_warnings_and_none_of_flowers_chatter():
    text = shown(
        "\x1b[92mINFO \x1b[0m:      [ROUND 1/3]",
        "\x1b[92mINFO \x1b[0m:      configure_train: Sampled 4 nodes (out of 4)",
        "\x1b[92mINFO \x1b[0m:      round   1/3  accuracy  50.0%",
        "\x1b[93mWARNING \x1b[0m:   Node 3 is \x07late",
        "\x1b[93mWARNING \x1b[0m:   Node 3 is \x07late",
        "\x1b[93mWARNING \x1b[0m:   fraction_evaluate is set to 0.0. It will be skipped.",
        "\x1b[92mINFO \x1b[0m:      members distil their data: 1 of 3 nodes, about 8 s left",
        "\x1b[92mINFO \x1b[0m:      Final results:",
        "\x1b[92mINFO \x1b[0m:      ",
        "\x1b[92mINFO \x1b[0m:      \tAggregated ClientApp-side Train Metrics:",
        "\x1b[92mINFO \x1b[0m:      \t{ 1: {'train-loss': '8.1e-01'},",
        "\x1b[92mINFO \x1b[0m:      Results in runs/7",
    )
    assert text.splitlines() == [
        "round   1/3  accuracy  50.0%",
        "warning: Node 3 is  late",
        "members distil their data: 1 of 3 nodes, about 8 s left",
        "Results in runs/7",
    ]


def test_a_terminal_shows_levels_in_colours_and_progress_in_one_place():
    text = shown(
        "WARNING :   late",
        "ERROR :     nothing was learnt",
        "INFO :      members distil their data: 1 of 3 nodes, about 8 s left",
        terminal=True,
    )
    assert re.search(r"\x1b\[33mwarning: late", text)
    assert re.search(r"\x1b\[31merror: nothing was learnt", text)
    assert text.count("1 of 3 nodes") <= 1


def test_overrides_are_read_as_flower_reads_them():
    text = """a=1 b.c=2.5 d=true e="x y" f='{"g": 1}' h="\\"q\\"" """
    expected = {"a": 1, "b.c": 2.5, "d": True, "e": "x y", "f": '{"g": 1}', "h": '"q"'}
    assert read_run_config(text) == expected
    assert read_run_config(text.replace("=", " = ", 3)) == expected
    with pytest.raises(RunConfigError, match="no override"):
        read_run_config("a=1 b")
