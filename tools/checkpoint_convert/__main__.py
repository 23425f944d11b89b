"""`python -m tools.checkpoint_convert COMMAND ...`"""

from megarlhf.commands.convert import main

if __name__ == "__main__":
    raise SystemExit(main())
