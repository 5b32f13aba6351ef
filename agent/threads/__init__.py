"""Waits and locks that Ctrl-C, signal handlers, forks and other threads cannot break."""
