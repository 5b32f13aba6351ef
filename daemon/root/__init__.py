"""Reaches the root off the event loop: its identity, the claims of attempts, and calls
that may hang.
"""
