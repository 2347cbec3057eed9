"""Whatever bytes come as an array of a model, they are numbers or refused."""

from io import BytesIO

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from hypothesis import example, given
from hypothesis import strategies as st

from flwr_distill.protocol.arrays import finite_arrays, model_arrays
from flwr_distill.protocol.outliers import update_norm

from .conftest import FUZZ, damaged

START = {"w": np.arange(6, dtype=np.float32).reshape(2, 3)}
FILE = BytesIO()
np.save(FILE, START["w"])
ARCHIVE = BytesIO()
np.savez_compressed(ARCHIVE, w=START["w"])


def read(data, start):
    """The arrays that came with these bytes, as a model or as arrays of any form."""
    record = ArrayRecord({"w": Array("float32", (2, 3), "numpy.ndarray", data)})
    return finite_arrays(record) if start is None else model_arrays(record, start)


@FUZZ
@example(FILE.getvalue(), START)
@example(FILE.getvalue(), None)
@given(
    st.binary(max_size=200) | damaged(FILE.getvalue()) | damaged(ARCHIVE.getvalue()),
    st.sampled_from([START, None]),
)
def test_what_came_is_numbers_whose_norm_is_a_number_or_it_is_refused(data, start):
    try:
        arrays = read(data, start)
    except ValueError:
        assert data != FILE.getvalue()
    else:
        assert all(np.isfinite(array).all() for array in arrays.values())
        assert update_norm(arrays, start) >= 0


@pytest.mark.parametrize("start", [START, None])
@pytest.mark.parametrize("data", [b"", FILE.getvalue()[:-1], ARCHIVE.getvalue()])
def test_what_is_no_array_is_refused(data, start):
    with pytest.raises(ValueError, match="w"):
        read(data, start)
