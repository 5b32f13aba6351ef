"""Shows a daemon live in a terminal, for `ckptd top`."""
