"""Tables of the papers beside ours: `benchmarks.papers.command`."""
