"""Real images in place of virtual ones: these and no others, of each class."""

import torch

from benchmarks.real_images import random_real


def test_as_many_different_real_images_of_each_class_leave_as_are_asked_for():
    images = torch.arange(12.0).reshape(12, 1, 1, 1)
    labels = torch.tensor([3, 7] * 6)
    generator = torch.Generator().manual_seed(0)
    virtual = random_real(images, labels, num_classes=10, per_class=2, generator=generator)
    places = virtual.images.flatten().long()
    assert len(set(places.tolist())) == 4
    assert virtual.labels.tolist() == labels[places].tolist() == [3, 3, 7, 7]
