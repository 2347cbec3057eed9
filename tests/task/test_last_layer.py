"""The last dense layer is found in any model."""

import pytest
import torch
from torch import nn

from flwr_distill.task.datasets import DataSpec
from flwr_distill.task.models import ModelError, create_model, last_dense, model_names
from tests.errors import at


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28)])
def test_in_every_model_of_ours_it_is_the_one_that_gives_the_logits(shape):
    half = (0.5,) * shape[0]
    spec = DataSpec("images", shape, 10, half, half)
    for name in model_names(spec):
        model = create_model(name, spec, seed=0).eval()
        outputs = []
        model.get_submodule(last_dense(model)).register_forward_hook(
            lambda _module, _inputs, output, outputs=outputs: outputs.append(output)
        )
        logits = model(torch.rand(2, *spec.shape))
        torch.testing.assert_close(outputs[-1], logits)


def test_it_can_be_named_and_a_wrong_name_says_what_there_is():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    assert last_dense(model) == "1"
    assert last_dense(model, "0") == "0"
    with pytest.raises(ModelError, match="0, 1", check=at("train.feature-layer", value="2")):
        last_dense(model, "2")
    with pytest.raises(ModelError, check=at("Conv2d")):
        last_dense(nn.Conv2d(1, 1, 1))
