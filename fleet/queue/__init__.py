"""The queue of runs: its file, what starts and ends its runs, and the socket of its users."""
