"""What a run leaves behind while it goes: recorder, journal, checkpoints, and resuming."""
