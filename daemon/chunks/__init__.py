"""Reads chunks of slots, checks and encodes them on worker threads, and paces them by
the speed of the storage.
"""
