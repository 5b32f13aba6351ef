"""Follows the newest snapshot of a job from another process, such as one that serves
the model that is being trained.
"""
