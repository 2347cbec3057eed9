"""Flower 1.36, and what 1.41 and 1.42 have in common with it: apps speak HTTP to a SuperNode."""
