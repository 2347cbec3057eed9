"""Benchmarks: side by side in one run, printed as tables; none of them is a test.

Run them in the repository's root: elsewhere ``python -m benchmarks`` is a package of Opacus's.
"""
