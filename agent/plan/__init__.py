"""Which rank writes which bytes of a snapshot, and where they lie in its slot."""
