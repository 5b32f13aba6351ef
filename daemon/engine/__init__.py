"""Answers the ranks: takes their seals in, decides what becomes of each step, and keeps
the slots of dead trainers.
"""
