"""A Flower app as Flower's quickstart with PyTorch has it."""
