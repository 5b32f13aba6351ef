"""Captures a training state as named tensors and plain values, encodes it, and merges
the states of several ranks.
"""
