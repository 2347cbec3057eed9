"""Flower 1.41 and 1.42: what is used of them is alike."""
