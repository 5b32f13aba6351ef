"""Copies sealed slots to ranks on other nodes, and reads them back."""
