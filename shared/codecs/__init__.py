"""Encodes and decodes chunks."""
