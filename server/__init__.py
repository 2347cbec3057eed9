"""The server side of a federation: the ServerApp, its settings, grid and reports."""
