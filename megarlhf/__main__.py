"""The entry point, of `python -m megarlhf` and of the console script `megarlhf`."""

import os
import signal
import sys


def main() -> int:
    """Run the command line; returns the exit status. Ctrl-C is one line and 130, also while modules are imported."""
    try:
        from megarlhf.resume.signals import KEEP_EARLY, note_early

        options_first = sys.argv[1:2] and sys.argv[1].startswith("-")
        if not KEEP_EARLY.isdisjoint(sys.argv[1:] if options_first else sys.argv[1:2]):
            note_early()
        from megarlhf.commands.cli import main as run_command

        return run_command()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second one ends the process at once, without a traceback
        if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
            print(" ".join(["megarlhf", *sys.argv[1:2]]) + ": interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
