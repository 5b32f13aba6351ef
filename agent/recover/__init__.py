"""Chooses the snapshot to recover, and writes it into the caller's state."""
