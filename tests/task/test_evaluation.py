"""Accuracy and loss of a classifier, however many samples there are."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from task.datasets import Samples
from task.evaluation import BATCH_SIZE, evaluate_model, predict


@pytest.mark.parametrize("n", [1, BATCH_SIZE, BATCH_SIZE + 1, 2 * BATCH_SIZE + 7])
def test_every_sample_counts_once_and_in_evaluation_mode(n):
    generator = torch.Generator().manual_seed(n)
    samples = Samples(
        torch.randn(n, 1, 2, 2, generator=generator), torch.randint(0, 3, (n,), generator=generator)
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3))
    model[1].running_mean.fill_(0.3)
    with torch.no_grad():
        logits = model.eval()(samples.inputs)
    model.train()
    accuracy, loss = evaluate_model(model, samples)
    assert not model.training
    assert accuracy == int((logits.argmax(1) == samples.labels).sum()) / n
    assert loss == pytest.approx(float(functional.cross_entropy(logits, samples.labels)), rel=1e-4)
    assert torch.equal(predict(model.train(), samples)[0], logits.argmax(1))
