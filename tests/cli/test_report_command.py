"""`flwr-distill report` at its command line."""

from typer.testing import CliRunner

from flwr_distill.cli.main import app


def invoke(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_a_run_is_found_by_folder_by_id_and_as_the_latest(finished_run):
    folder = finished_run("11")
    report = folder / "report.html"
    written = report.read_text()
    for name in (folder, "11", "latest"):
        report.unlink()
        result = invoke(name, "--runs-dir", folder.parent)
        assert result.exit_code == 0, result.output
        assert result.stdout.strip() == str(report)
        assert report.read_text() == written


def test_several_runs_are_compared_in_one_page(finished_run, tmp_path):
    folders = [finished_run("1", strategy="fedavg"), finished_run("2", strategy="hfldd")]
    assert invoke(*folders).output.strip() == str(folders[0].parent / "comparison.html")
    assert invoke(*folders, "--output", tmp_path / "both.html").exit_code == 0
    page = (tmp_path / "both.html").read_text()
    assert "<title>fedavg · hfldd</title>" in page
    assert "Settings that differ" in page


def test_an_unknown_run_is_an_error_with_the_remedy(tmp_path):
    result = invoke("nope", "--runs-dir", tmp_path)
    assert result.exit_code == 1
    assert "no run nope in " in result.stderr
    assert "runs list" in result.stderr
