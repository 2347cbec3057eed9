"""The benchmark of rounds tells a federation's processes apart by what they run."""

import pytest

from benchmarks.rounds import program_of


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        (
            ["/usr/bin/python", "-P", "-m", "flwr_distill.flower.worker", "--device", "cpu"],
            "flower.worker",
        ),
        (
            ["/usr/bin/python", "-P", "-m", "flwr_distill.flower.executor"],
            "flower.executor",
        ),
        (
            ["/usr/bin/python", "-P", "-m", "flwr_distill.node.mailbox", "3"],
            "node.mailbox",
        ),
        (["/usr/bin/python", "/usr/bin/flower-superlink"], "flower-superlink"),
        (
            ["/usr/bin/python", "/usr/bin/flwr-distill", "node", "--config", "x"],
            "node.main",
        ),
        (["/usr/bin/sh", "-c", "true"], "other"),
    ],
)
def test_a_process_is_named_by_its_program_or_module(command, kind):
    assert program_of("python", command) == kind


def test_a_process_that_a_nursery_forked_is_named_by_its_module():
    nursery = ["/usr/bin/python", "-P", "-m", "flwr_distill.node.nursery", "workers", "3", "torch"]
    assert program_of("flower.worker", nursery) == "flower.worker"
    assert program_of("flower.supernod", nursery) == "flower.supernode"
    assert program_of("fleet.serverapp", nursery) == "fleet.serverapp"
    assert program_of("python", nursery) == "node.nursery"
