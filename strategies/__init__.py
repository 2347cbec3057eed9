"""Flower strategies for federations whose data differ, and the maths behind them."""
