"""Knows each job: its ranks, steps, snapshots and checkpoints, and decides what becomes
of them. No module here does I/O.
"""
