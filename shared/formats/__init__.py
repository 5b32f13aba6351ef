"""The formats of files and documents (FORMAT.md): encoding, decoding and the checks of
each.
"""
