"""The connections of a rank: to the daemon of its node, and to the other ranks over the
job's store.
"""
