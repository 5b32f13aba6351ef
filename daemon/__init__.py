"""The checkpoint daemon of one node: owns the slots, saves and commits snapshots, keeps
a journal, recovers after a crash.

The daemon never imports torch or `ckptd.agent`.
"""
