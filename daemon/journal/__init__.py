"""Keeps the journal, which tells the next daemon what this one was about to do."""
