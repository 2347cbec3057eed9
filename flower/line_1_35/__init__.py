"""Flower 1.35 to 1.37, and what later lines have in common: apps speak HTTP to a SuperNode."""
