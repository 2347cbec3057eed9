"""A resumed run's nodes, under new ids and before that under others, and its rounds."""

import numpy as np
from flwr.app import ArrayRecord, RecordDict

from flwr_distill.protocol.meeting import CONTINUE
from flwr_distill.protocol.messages import CONFIG
from flwr_distill.server.record.checkpoint import Checkpoint
from flwr_distill.server.record.resume import continue_on_nodes, restore
from flwr_distill.server.roster import Roster
from flwr_distill.strategies.cadis import CADIS
from flwr_distill.strategies.cadis.similarity import KnownPairs
from flwr_distill.strategies.common.directory import Description


def met(partitions):
    """Roster of nodes with these partitions, by id."""
    return Roster(nodes={node: Description(1, partition=i) for node, i in partitions.items()})


def test_of_the_ids_that_a_node_had_the_last_one_becomes_its_new_one():
    before = CADIS()
    before.places = {11: 0, 12: 1, 13: 2}
    before.known = KnownPairs().after(np.arange(3), np.ones((3, 3)))
    checkpoint = Checkpoint(
        run_id=1,
        round=4,
        settings={},
        nodes={11: "0", 12: "1", 13: "0"},  # node 0 came back as 13
        arrays=ArrayRecord(),
        state=before.state_dict(),
        record={},
    )
    resumed = CADIS()
    restore(resumed, checkpoint, met({21: 0, 22: 1}))
    assert resumed.places == {11: 0, 22: 1, 21: 2}


def test_nodes_that_took_part_take_up_what_they_kept_and_others_are_named(memory_grid, flower_log):
    before = {2**64 - 11: "0", 12: "1", 13: "0", 14: "3"}  # node 0 came back as 13
    checkpoint = Checkpoint(2**63 + 1, 4, {}, before, ArrayRecord(), {}, {})
    grid = memory_grid({node: lambda message: RecordDict() for node in (21, 22, 23)})
    continue_on_nodes(grid, checkpoint, met({21: 0, 22: 1, 23: 2}), timeout=5)
    told = {
        message.metadata.dst_node_id: (message.metadata.message_type, dict(message.content[CONFIG]))
        for message in grid.pushed
    }
    run = {"run-id": str(2**63 + 1), "round": 4}
    assert told == {
        21: (CONTINUE, {**run, "node-id": "13"}),
        22: (CONTINUE, {**run, "node-id": "12"}),
    }
    assert flower_log.messages == ["Node 23 is new to the run", "node-3 is not back"]
