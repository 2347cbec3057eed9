"""Evaluation on the server."""

import math

import numpy as np
import torch
from flwr.app import ArrayRecord
from sklearn.metrics import accuracy_score, log_loss, recall_score
from torch import nn

from flwr_distill.server.task import server_evaluation
from flwr_distill.task.datasets import Samples


def test_accuracy_loss_and_accuracy_by_class_are_scikit_learns():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(200, 1, 2, 2, generator=generator)
    labels = torch.randint(0, 3, (200,), generator=generator)
    labels[labels == 1] = 3  # no sample of class 1
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 4))
    weights = ArrayRecord(model.state_dict())
    with torch.no_grad():
        logits = model(inputs)
        model[1].weight.zero_()  # the weights that come are what counts
    metrics = server_evaluation(model, Samples(inputs, labels))(1, weights)

    predicted = logits.argmax(1).numpy()
    assert metrics["accuracy"] == accuracy_score(labels, predicted)
    probabilities = logits.double().softmax(1).numpy()
    assert np.isclose(metrics["loss"], log_loss(labels, probabilities, labels=range(4)), rtol=1e-5)
    by_class = metrics["class-accuracy"]
    assert math.isnan(by_class[1])
    present = [0, 2, 3]
    expected = recall_score(labels, predicted, labels=present, average=None)
    assert np.allclose([by_class[c] for c in present], expected)
