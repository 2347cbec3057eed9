"""Flower 1.38: tasks are claimed as before it, and messages are of a task, as after it."""
