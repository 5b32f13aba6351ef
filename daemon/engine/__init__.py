"""Answers the ranks: takes their seals in, carries out what `daemon/job` decides about
each step, and keeps the slots of dead trainers.
"""
