"""A run is followed to the last line of its log, whatever comes between two calls."""

from flwr_distill.fleet import submission
from flwr_distill.flower.control import OutageError, RunStatus, SuperLinkError


class Link:
    """A SuperLink whose answers to `log` and `run_status` are given, one for each call."""

    def __init__(self, logs, statuses):
        self.logs, self.statuses = iter(logs), iter(statuses)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def log(self, run_id, after, seconds):
        lines = next(self.logs)
        if isinstance(lines, Exception):
            raise lines
        yield from ((text, after + 1 + place) for place, text in enumerate(lines))

    def run_status(self, run_id):
        status = next(self.statuses)
        if isinstance(status, Exception):
            raise status
        return RunStatus(status)


def followed(logs, statuses):
    link, lines = Link(logs, statuses), []
    return submission.follow(7, lambda: link, lines.append, 60.0).status, lines


def test_lines_between_the_end_of_a_stream_and_that_of_the_run_are_shown():
    logs = [["one\n", "tw"], ["o\n"], ["Results in runs/7\n", "last"]]
    status, lines = followed(logs, ["running", "finished:completed"])
    assert status == "finished:completed"
    assert lines == ["one", "two", "Results in runs/7", "last"]


def test_a_superlink_that_stops_in_between_is_asked_again(monkeypatch):
    monkeypatch.setattr(submission, "_PAUSE", 0.0)
    logs = [OutageError("away"), ["one\n"], ["two\n"], []]
    status, lines = followed(logs, [OutageError("away"), "finished:failed"])
    assert (status, lines) == ("finished:failed", [submission._AWAY, "one", "two"])


def test_one_that_is_gone_once_the_run_is_over_costs_the_last_lines_alone():
    logs = [["one\n"], SuperLinkError("gone")]
    assert followed(logs, ["finished:completed"]) == ("finished:completed", ["one"])
