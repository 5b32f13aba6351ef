"""Chooses the snapshot that comes back, and writes it into the caller's state."""
