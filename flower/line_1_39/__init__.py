"""Flower 1.39 to 1.42: what is used of them is alike."""
