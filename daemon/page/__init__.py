"""Serves the page that shows a daemon, its history and its checkpoints in a browser."""
