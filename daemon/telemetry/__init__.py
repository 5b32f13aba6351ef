"""Tells operators and programs what the daemon does, without ever holding up a save."""
