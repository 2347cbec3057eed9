"""The grid of a run: transport, byte counts, screening of replies, secure sums."""
