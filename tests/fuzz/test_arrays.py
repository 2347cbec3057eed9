"""Whatever bytes come as an array of a model, they are numbers or refused."""

from contextlib import suppress
from io import BytesIO

import numpy as np
from flwr.app import Array, ArrayRecord
from hypothesis import given
from hypothesis import strategies as st

from protocol.arrays import SentArrays
from protocol.outliers import update_norm

from .conftest import FUZZ, damaged

START = {"w": np.arange(6, dtype=np.float32).reshape(2, 3)}
FILE = BytesIO()
np.save(FILE, START["w"])
ARCHIVE = BytesIO()
np.savez_compressed(ARCHIVE, w=START["w"])


@FUZZ
@given(
    st.binary(max_size=200) | damaged(FILE.getvalue()) | damaged(ARCHIVE.getvalue()),
    st.sampled_from([START, None]),
)
def test_the_norm_of_what_came_is_a_number_or_it_is_refused(data, start):
    record = ArrayRecord({"w": Array("float32", (2, 3), "numpy.ndarray", data)})
    with suppress(ValueError):
        assert update_norm(SentArrays(record), start) >= 0
