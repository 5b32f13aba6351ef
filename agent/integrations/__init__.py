"""One line for each training framework: `ckptd.integrations.transformers`, and its like.

A module of this package imports its framework when it is first used.
"""

if __name__ != "ckptd.integrations":
    raise ImportError(f"import ckptd.integrations instead of {__name__}")
