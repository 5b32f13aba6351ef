"""The per-node daemon: keeps slots, runs save plans, commits, journals, recovers. Never imports torch or `ckptd.agent`."""
