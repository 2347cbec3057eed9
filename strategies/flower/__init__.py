"""Flower's strategies, fitted to our nodes and to models that hold more than weights."""
