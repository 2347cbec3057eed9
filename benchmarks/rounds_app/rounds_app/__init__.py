"""The app that `benchmarks/rounds.py` times on stock Flower and on ours."""
