"""Copies the checkpoints of a stage to the root behind it."""
