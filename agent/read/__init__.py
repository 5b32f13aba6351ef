"""Reads checkpoints and sealed slots, whole, by tensor or by slice, and verifies every
byte that it reads.
"""
