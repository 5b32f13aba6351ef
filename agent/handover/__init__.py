"""The life cycle of one rank's snapshots at the daemon, from the request for a slot to
the durable checkpoint.
"""
