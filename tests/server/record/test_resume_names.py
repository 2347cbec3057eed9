"""A resumed run's nodes under new ids, where some had come back under new ids before."""

import numpy as np
from flwr.app import ArrayRecord

from server.record.checkpoint import Checkpoint
from server.record.resume import restore
from server.roster import Roster
from strategies.cadis import CADIS
from strategies.cadis.similarity import KnownPairs


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
    restore(resumed, checkpoint, Roster(names={21: "0", 22: "1"}))
    assert resumed.places == {11: 0, 22: 1, 21: 2}
