"""Stores checkpoints: the implementations of the storage seam, and the layout of
checkpoints on any of them.

No module outside this package knows whether a checkpoint lies on a POSIX file system or
elsewhere.
"""
