"""Runs the process of a daemon: its sockets, clients, signals and limits."""
