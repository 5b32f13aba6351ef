"""Saves a snapshot: writes its parts, commits it, and deletes what retention does not
keep.
"""
