"""Saving and loading a run. The engine sees only `CheckpointManager` and `TrainingState`."""
