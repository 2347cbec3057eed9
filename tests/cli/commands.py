"""Commands of `flwr-distill`, run in this process."""

from typer.testing import CliRunner

from flwr_distill.cli.main import app


def command(*words, env=(), **named):
    return CliRunner().invoke(app, [str(word) for word in words], env=dict(env), **named)


def assert_refused(result, *words):
    """The command ended with 1 and one line on standard error, which has these words."""
    assert result.exit_code == 1, result.output
    (line,) = result.stderr.splitlines()
    assert [word for word in words if str(word) not in line] == [], line
