"""Plays `megarlhf` for the batch scripts: counts steps, leaves resume points, obeys signals. A fraction of a second to
start, and no work for the processor, so that the scripts' life cycle can be tested for itself.

    stand_in.py COMMAND -c FILE run.dir=DIR [steps=N] [seconds=S] [do=WHAT@RESTART.STEP.RANK ...]

WHAT: `exit:N`, `kill`, `hang`, of the given restart (`*`: every one), step and rank.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

RANK, RESTART = int(os.environ["SLURM_PROCID"]), os.environ.get("SLURM_RESTART_COUNT", "0")
TASKS = int(os.environ["SLURM_NTASKS"])


def main() -> int:
    command, *arguments = sys.argv[1:]
    options = dict(word.split("=", 1) for word in arguments if "=" in word and not word.startswith("do="))
    deeds = dict(reversed(word[3:].split("@")) for word in arguments if word.startswith("do="))
    run_dir, seconds = Path(options["run.dir"]), float(options.get("seconds", 0.5))
    received: list[int] = []
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda number, frame: received.append(number))
    state = Path(os.environ["MEGARLHF_JOB_STATE"])
    points = sorted(run_dir.glob("resume/step_*/MANIFEST.json"))
    step = int(points[-1].parent.name.removeprefix("step_")) if points else 0
    say(f"{command} begins at step {step} on {os.environ['SLURMD_NODENAME']}", run_dir)
    if RANK == 0:
        (state / "run_dir").write_text(f"{run_dir}\n")
    while step < int(options.get("steps", 4)):
        step += 1
        time.sleep(seconds)
        deed = deeds.get(f"{RESTART}.{step}.{RANK}") or deeds.get(f"*.{step}.{RANK}") or ""
        if deed.startswith("exit:"):
            if deed[5:] in ("2", "4"):
                (state / f"exit.{RANK}").write_text(deed[5:] + "\n")
            return int(deed[5:])
        if deed == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        while deed == "hang":
            time.sleep(1)
        if received or options.get("every_step") == "yes":
            save(run_dir, step)
        if received:
            say(f"{command} saved step {step} after {signal.Signals(received[0]).name}", run_dir)
            time.sleep(RANK)  # ranks do not leave at the same moment
            return 75
    if RANK == 0:
        (run_dir / "FINISHED").write_text(json.dumps({"step": step}))
    say(f"{command} finished at step {step}", run_dir)
    return 0


def save(run_dir: Path, step: int) -> None:
    if RANK == 0:
        point = run_dir / f"resume/step_{step:06d}"
        point.mkdir(parents=True, exist_ok=True)
        (point / "MANIFEST.json").write_text("{}")


def say(what: str, run_dir: Path) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / "log").open("a") as file:
        file.write(f"restart {RESTART} rank {RANK}: {what}\n")


if __name__ == "__main__":
    sys.exit(main())
