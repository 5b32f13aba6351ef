"""Runs the `ckptd` command when Python is started with `python -m ckptd.daemon`."""

from ckptd.daemon.commands.cli import main

if __name__ == "__main__":
    main()
