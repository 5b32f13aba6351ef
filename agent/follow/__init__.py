"""Finds the newest snapshot of a job, and follows it from another process, such as one
that serves the model that is being trained.
"""
