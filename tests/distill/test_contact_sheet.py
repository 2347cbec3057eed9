"""A contact sheet shows every class in a row of its own."""

import numpy as np
import pytest
import torch

from flwr_distill.distill.contact_sheet import contact_sheet
from tests.distill.builders import normal


def test_rows_are_classes_and_columns_their_images():
    images = torch.zeros(5, 1, 8, 8)
    images[[1, 3]] = 1.0  # class 1 is bright
    sheet = np.asarray(contact_sheet(images, torch.tensor([0, 1, 0, 1, 0]), ["a", "b"]))
    height, width = sheet.shape[:2]
    assert height == 2 + 2 * 50
    row = [sheet[25, width - 25 - 50 * column].tolist() for column in (2, 1, 0)]
    assert row == [[0, 0, 0]] * 3
    row = [sheet[75, width - 25 - 50 * column].tolist() for column in (2, 1, 0)]
    assert row == [[255, 255, 255]] * 3
    assert (sheet[75, width - 75] == 255).all()


def test_colours_are_kept():
    images = torch.zeros(1, 3, 8, 8)
    images[:, 1] = 1.0
    sheet = np.asarray(contact_sheet(images, torch.tensor([0]), ["green"]))
    assert sheet[25, -25].tolist() == [0, 255, 0]


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 20), (2, 5, 5), (1, 200, 300)])
def test_images_of_any_shape_fit_with_at_most_twenty_columns(shape):
    images = normal(30, *shape)
    names = ["class", "name"]
    full = contact_sheet(images, torch.zeros(30).long(), names)
    cut = contact_sheet(images[:20], torch.zeros(20).long(), names)
    factor = max(1, 48 // max(shape[1:]))
    assert full.size == cut.size
    assert full.height == 2 + 2 + factor * shape[1]
    assert full.width >= 20 * (factor * shape[2] + 2)


def test_constant_images_are_drawn():
    assert contact_sheet(torch.full((2, 1, 4, 4), 7.0), torch.tensor([0, 1]), ["a", "b"]).size
