"""Plans a snapshot: which rank writes which bytes, and where they lie in the slot of
that rank.
"""
