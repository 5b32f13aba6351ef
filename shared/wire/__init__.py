"""The protocol between agent and daemon (PROTOCOL.md): frames, messages and the session
of a connection.
"""
