"""What the benchmark of frozen features trains and tests on."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.analytic import fashion, mnist_m, mnist_m_held_out

SHARED = Path(__file__).resolve().parents[3] / "shared/data"


@pytest.mark.skipif(not SHARED.exists(), reason=f"no real data in {SHARED}")
def test_fashion_is_tested_on_images_of_all_classes_that_no_node_has():
    data = fashion(SHARED, download=False)
    for part, size in ((data.train, 80), (data.test, 20)):
        assert abs(np.bincount(part.labels, minlength=10) - size).max() <= 10
    trained = {image.tobytes() for image in data.train.images}
    assert not trained & {image.tobytes() for image in data.test.images}


@pytest.mark.skipif(not SHARED.exists(), reason=f"no real data in {SHARED}")
def test_what_is_held_out_for_choosing_is_of_the_training_images():
    whole, data = mnist_m(SHARED, download=False), mnist_m_held_out(SHARED, download=False)
    train, test = ({image.tobytes() for image in part.images} for part in (data.train, data.test))
    assert len(data.test) == len(whole.train) / 5
    assert train | test == {image.tobytes() for image in whole.train.images}
    assert not train & test
