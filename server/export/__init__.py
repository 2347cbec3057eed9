"""Export of a run's model, with its card."""
