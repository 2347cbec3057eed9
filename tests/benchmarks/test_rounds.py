"""The benchmark of rounds tells a federation's processes apart by what they run."""

import pytest

from benchmarks.rounds import _kind


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        (
            ["/usr/bin/python", "-P", "-m", "node.line.worker", "--device", "cpu"],
            "node.line.worker",
        ),
        (["/usr/bin/python", "-P", "-m", "node.line.executor"], "node.line.executor"),
        (["/usr/bin/python", "-P", "-m", "links.mailbox", "3"], "links.mailbox"),
        (["/usr/bin/python", "/usr/bin/flower-superlink"], "flower-superlink"),
        (["/usr/bin/python", "/usr/bin/flwr-distill", "node", "--config", "x"], "node"),
        (["/usr/bin/sh", "-c", "true"], "other"),
    ],
)
def test_a_process_is_named_by_its_program_or_module(command, kind):
    assert _kind(command) == kind
