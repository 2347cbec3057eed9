"""``python -m benchmarks.papers``; `benchmarks.papers.command` explains it."""

from benchmarks.papers.command import main

main()
