"""Flower strategies for federations whose data differ, and the maths behind them."""

if __name__ != "flwr_distill.strategies":  # in a checkout, whose folder is on Python's path
    raise ImportError(f"{__name__} would be a second copy (import flwr_distill.strategies)")
