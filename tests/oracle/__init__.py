"""The rig that compares a recovery with torch's own round trip, over random programs
and random changes of them.
"""
