"""A web page of a federation: its nodes, queue, runs and health."""
