"""Entry point of `python -m megarlhf` and of the console script `megarlhf`."""

import os
import signal
import sys

_ONLY_PRINT = frozenset({"keys", "completion", "--version", "--help", "-h"})
"""Arguments of commands whose reader may stop early: `megarlhf rl --help | head`."""


def main() -> int:
    """Run the command line; returns the exit status. Ctrl-C prints one line and gives 130, also during imports."""
    # Torch reads it when it is imported. Its C++ code, and vLLM's, would print warnings between the lines of a run.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if not sys.flags.safe_path and "" not in sys.path:
        sys.path.insert(0, "")  # finds reward functions in the working directory, also for the console script
    try:
        from megarlhf.resume.signals import KEEP_EARLY, note_early

        # The command may follow options and overrides.
        first = next(iter(sys.argv[1:]), "")
        if not KEEP_EARLY.isdisjoint(sys.argv[1:] if first.startswith("-") or "=" in first else [first]):
            note_early()
        from megarlhf.commands.process_tree import BUSY

        os.environ[BUSY] = " ".join(["megarlhf", *sys.argv[1:2]])
        from megarlhf.commands.cli import main as run_command

        status = run_command()
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        if not _ONLY_PRINT.intersection(sys.argv[1:]):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return 0
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second one ends the process at once, without a traceback
        if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
            print(" ".join(["megarlhf", *sys.argv[1:2]]) + ": interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
