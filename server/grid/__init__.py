"""The grid of a run: polling, deadlines, byte counts, disk storage, screening of replies."""
