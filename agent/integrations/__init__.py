"""Integrations with training frameworks, one module each, which need one line in a script.

A module of this package imports its framework when it is first used.
"""

if __name__ != "ckptd.integrations":
    raise ImportError(f"import ckptd.integrations instead of {__name__}")
