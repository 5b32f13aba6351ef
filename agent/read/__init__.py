"""Reads checkpoints and sealed slots: whole, by tensor or by slice, verified as it reads."""
