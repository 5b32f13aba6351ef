"""Owns the memory of snapshots: segments, their slots, and who gets one."""
