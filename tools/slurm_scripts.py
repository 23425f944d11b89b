"""The batch scripts in slurm/, put together from slurm/parts/: `python -m tools.slurm_scripts` (`make slurm-scripts`).

Every script is whole in itself. Slurm keeps a copy of a batch script and starts that again, perhaps weeks later: a
file that the script sources would by then be another version, and would have to be found from wherever it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SLURM = Path(__file__).parents[1] / "slurm"

WHOLE_NODES = """\
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#
# One task for each GPU. Where a task should see its own GPU only, add --gpus-per-task=1 on the command line; with
# another number of tasks on a node give --gpus-per-node too.
# A task needs cores beside its GPU: vLLM's scheduler, NCCL's proxies, the compiler of kernels. 8 x 8 fit into any
# node of 8 GPUs; give it more where yours has more.
#SBATCH --cpus-per-task=8
#
# The whole node and all of its memory: checkpoints are gathered there, and a neighbour on the node would take cores.
# Where jobs share nodes by design, remove the two lines and ask for what you need.
#SBATCH --mem=0
#SBATCH --exclusive
#
#SBATCH --output=%x-%j.out
"""

LIFE_CYCLE = """\
#SBATCH --open-mode=append
#
# Ten minutes before the time limit the ranks get SIGUSR1: they save at the next border between two optimizer steps
# and end with status 75, and this script queues its job again. Without `B:` the signal goes to the ranks themselves.
# Give it more than the longest optimizer step and the longest save take together.
#SBATCH --signal=USR1@600
#SBATCH --requeue
"""

NO_REQUEUE = """\
#
# Not queued again after a failed node: it takes minutes, and begins anew when it is submitted again.
#SBATCH --no-requeue
"""

CONVERSION = """\
#SBATCH --nodes=1
#SBATCH --ntasks=1
#
# A conversion reads and writes files; memory for a few tensors is enough, and more cores do not help.
#SBATCH --cpus-per-task=2
#SBATCH --mem=32G
#SBATCH --output=%x-%A_%a.out
"""


@dataclass(frozen=True)
class Script:
    """One batch script."""

    what: str
    usage: str
    options: str
    parts: tuple[str, ...]
    command: str = ""
    nodes: int = 1


TRAIN = ("start", "rendezvous", "site", "train")
EVAL = ("start", "rendezvous", "site", "eval")
CONFIG = "-c FILE [key=value ...]"
SCRIPTS = {
    "sft": Script("Supervised fine-tuning", CONFIG, WHOLE_NODES + LIFE_CYCLE, TRAIN, "sft"),
    "rm": Script("A reward model", CONFIG, WHOLE_NODES + LIFE_CYCLE, TRAIN, "rm"),
    "dpo": Script("Preference optimisation on pairs", CONFIG, WHOLE_NODES + LIFE_CYCLE, TRAIN, "dpo"),
    "rl": Script("PPO, GRPO and their relatives", CONFIG, WHOLE_NODES + LIFE_CYCLE, TRAIN, "rl", nodes=4),
    "eval": Script("Score a model's responses by rules", CONFIG, WHOLE_NODES + NO_REQUEUE, EVAL, "eval"),
    "test-gpu": Script(
        "The first hour on a cluster: what a CPU has computed, asked of these GPUs",
        "DIRECTORY [option ...]",
        WHOLE_NODES + NO_REQUEUE,
        ("start", "rendezvous", "site", "test_gpu"),
    ),
    "convert": Script(
        "Conversions between Hugging Face and Megatron, one for each line of a file: a line is what stands behind\n"
        "# `megarlhf convert`, and the array's numbers are line numbers",
        "FILE",
        CONVERSION + NO_REQUEUE,
        ("start", "site", "convert"),
    ),
}

EXAMPLES = {
    "sft": ("--nodes=2 --time=8:00:00 {script} -c configs/x.yaml train.num_steps=500",),
    "rm": ("--time=8:00:00 {script} -c configs/x.yaml",),
    "dpo": ("--time=8:00:00 {script} -c configs/x.yaml loss=ipo",),
    "rl": ("--nodes=16 --time=24:00:00 {script} -c configs/x.yaml",),
    "eval": ("{script} -c configs/x.yaml",),
    "test-gpu": (
        "--time=2:00:00 {script} runs/gpu_check",
        "--nodes=2 --time=2:00:00 {script} runs/gpu_check --only sft,ppo,engine",
    ),
    "convert": ("--array=1-3 {script} conversions.txt",),
}
WITHOUT_GPUS = tuple(name for name in SCRIPTS if name not in ("convert", "test-gpu"))
ON_A_CPU = "--gpus-per-node=0 --ntasks-per-node=2 --cpus-per-task=1 {script} -c configs/x.yaml    # without GPUs"


def text(name: str) -> str:
    """The whole script."""
    script = SCRIPTS[name]
    commands = (*EXAMPLES[name], ON_A_CPU) if name in WITHOUT_GPUS else EXAMPLES[name]
    examples = "".join(f"#     sbatch {line.format(script=f'slurm/{name}.sbatch')}\n" for line in commands)
    head = (
        f"#!/usr/bin/env bash\n# {script.what}:\n#\n{examples}#\n"
        "# Every option below is a default: the same option on sbatch's command line wins. Submit from the repository\n"
        "# root, or from wherever the relative paths of your configuration begin.\n#\n"
        "# Made by tools/slurm_scripts.py from slurm/parts/: change it there, then `make slurm-scripts`.\n#\n"
        f"#SBATCH --job-name=megarlhf-{name}\n" + script.options.format(nodes=script.nodes)
    )
    body = "".join((SLURM / "parts" / f"{part}.sh").read_text() for part in script.parts)
    for mark, value in {"@NAME@": name, "@COMMAND@": script.command, "@USAGE@": script.usage}.items():
        body = body.replace(mark, value)
    return head + body


def main(argv: Sequence[str] | None = None) -> int:
    """Write every script; returns the exit status."""
    del argv
    for name in SCRIPTS:
        (SLURM / f"{name}.sbatch").write_text(text(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
