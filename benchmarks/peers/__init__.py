"""Simulations by several systems, a process tree each; `python -m benchmarks.simulation --peers`.

`harness` starts and times them, `systems` has their commands, `environments` installs other
projects, and `work` is what all of them train. The other modules are one system each.
"""
