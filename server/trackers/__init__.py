"""Hooks that send a run to a tracking service."""
