"""What the benchmark of frozen features trains and tests on."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.analytic import fashion

ROOT = Path(__file__).resolve().parents[2] / "../shared/data"


@pytest.mark.skipif(not (ROOT / "fashion_mnist_aux").is_dir(), reason="no Fashion-MNIST in DIR")
def test_fashion_is_tested_on_images_of_all_classes_that_no_node_has():
    data = fashion(ROOT, download=False)
    for part, size in ((data.train, 80), (data.test, 20)):
        assert abs(np.bincount(part.labels, minlength=10) - size).max() <= 10
    trained = {image.tobytes() for image in data.train.images}
    assert not trained & {image.tobytes() for image in data.test.images}
