"""Stands in for a SuperLink's Control API; the real one is in test_live.py."""

from flwr_distill.flower.control import KnownRun, OutageError, RunStatus


class FakeControl:
    """Answers with these nodes and runs; None for no answer."""

    def __init__(self, nodes=(), runs=()):
        self.answers = nodes, runs

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def nodes(self):
        if self.answers is None:
            raise OutageError("is away")
        return list(self.answers[0])

    def runs(self):
        return list(self.answers[1])


def known_run(run_id, status="running", details="", submitted=1.0, resumes=""):
    return KnownRun(run_id, RunStatus(status, details), submitted, resumes=resumes)
