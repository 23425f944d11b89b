"""`python -m megarlhf` is the same as the console script `megarlhf`."""

from megarlhf.commands.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
