"""The operating system: files, locks, memory, settings, and the seams behind which
tests can put fakes.
"""
