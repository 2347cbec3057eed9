"""Benchmarks: side by side in one run, printed as tables; none of them is a test."""
