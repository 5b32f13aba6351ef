"""Watches over runs of several nodes by heartbeats, so that two runs of one job are not
live at a time.
"""
