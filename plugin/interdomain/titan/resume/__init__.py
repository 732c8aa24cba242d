"""Saving and resuming a run: checkpoints, the choice of one, the lock of a folder, preemption."""
