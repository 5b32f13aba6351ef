"""One rank at its daemon: the life cycle of a snapshot from the request for a slot to the durable checkpoint."""
