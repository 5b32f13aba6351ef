"""`python -m ckptd.daemon` is the `ckptd` command."""

from ckptd.daemon.cli import main

if __name__ == "__main__":
    main()
