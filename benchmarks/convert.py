"""Converter against `cp -r`: Hugging Face -> Megatron TP2 x PP2 on disk, and back, both synced. `make bench-convert`.

All of it in one run, interleaved: each round copies with cp, converts there, converts back, and runs the published
converters where they install; ratios are of medians. Sources are in the page cache for everyone. Before each step
a scratch file of the model's size is written and removed, so that every step finds as many pages that the machine
has backed with memory: on a virtual machine a first touch costs several times the copy, and whoever comes after a
deletion would win. Memory is measured apart, in a process of its own, as the largest RssAnon above its value after
the imports. What is timed of us: opening, planning, writing, fsync and rename, not the import of torch
(`hf_to_megatron_command` is the whole command, import included).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import peers
from benchmarks.machine import ROOT, machine
from benchmarks.random_llama import write_random_llama
from megarlhf.atomic_write import sync
from megarlhf.weights.checkpoint.conversion import HuggingFaceTarget, MegatronTarget, Target, convert
from megarlhf.weights.checkpoint.open_checkpoint import open_checkpoint
from megarlhf.weights.checkpoint.verify import digests

RESULT = ROOT / "benchmarks" / "results" / "convert.json"
FORMATS = ("torch_dist", "mp_rank")


def megatron(form: Any) -> MegatronTarget:
    return MegatronTarget(tp=2, pp=2, format=form)


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def level(work: Path, num_bytes: int) -> None:
    """Leaves so many free pages that have been used before, and nothing to be written back."""
    scratch = work / "scratch"
    with scratch.open("wb") as file:
        for _ in range(num_bytes // len(_NOISE) + 1):
            file.write(_NOISE)
        file.flush()
        os.fsync(file.fileno())
    scratch.unlink()


_NOISE = os.urandom(16 << 20)


def copy(source: Path, target: Path) -> None:
    """`cp -r`, then fsync of every file and directory: what any tool must at least do."""
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    for path in [*target.iterdir(), target]:
        sync(path)


def run(source: Path, out: Path, target: Target) -> None:
    convert(open_checkpoint(source), out, target)


def one_round(hf: Path, work: Path, num_bytes: int) -> dict[str, float]:
    """Seconds of each step."""
    level(work, num_bytes)
    seconds = {"cp": timed(lambda: copy(hf, work / "cp"))}
    shutil.rmtree(work / "cp")
    for form in FORMATS:
        there, back = work / form, work / f"{form}.hf"
        level(work, num_bytes)
        seconds[f"hf_to_megatron_{form}"] = timed(lambda: run(hf, there, megatron(form)))  # noqa: B023
        level(work, num_bytes)
        seconds[f"megatron_to_hf_{form}"] = timed(lambda: run(there, back, HuggingFaceTarget()))  # noqa: B023
        shutil.rmtree(there)
        shutil.rmtree(back)
    level(work, num_bytes)
    command = [sys.executable, "-m", "tools.checkpoint_convert", "hf-to-megatron", "--hf", str(hf), "--tp", "2"]
    command += ["--pp", "2", "--out", str(work / "cli")]
    seconds["hf_to_megatron_command"] = timed(lambda: subprocess.run(command, cwd=ROOT, check=True, **QUIET))
    shutil.rmtree(work / "cli")
    return seconds


QUIET: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}

MEMORY = """
import sys
from pathlib import Path
import torch
from benchmarks.convert import megatron, run
from benchmarks.peers import AnonymousPeak
from megarlhf.weights.checkpoint.conversion import HuggingFaceTarget
torch.set_num_threads(1)
hf, work, form = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
with AnonymousPeak() as there:
    run(hf, work / "there", megatron(form))
with AnonymousPeak() as back:
    run(work / "there", work / "back", HuggingFaceTarget())
print(there.peak_bytes, back.peak_bytes)
"""


def memory(hf: Path, work: Path) -> dict[str, int]:
    peaks = {}
    for form in FORMATS:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        done = subprocess.run(
            [sys.executable, "-c", MEMORY, str(hf), str(work), form],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        )
        there, back = map(int, done.stdout.split())
        peaks |= {f"hf_to_megatron_{form}": there, f"megatron_to_hf_{form}": back}
    shutil.rmtree(work)
    return peaks


def check_exact(hf: Path, work: Path) -> None:
    """Before anything is timed: there and back is the same model."""
    expected = digests(open_checkpoint(hf))
    for form in FORMATS:
        run(hf, work / "there", megatron(form))
        run(work / "there", work / "back", HuggingFaceTarget())
        for path in (work / "there", work / "back"):
            if digests(open_checkpoint(path)) != expected:
                raise RuntimeError(f"{form}: {path.name} is not the model that went in")
            shutil.rmtree(path)


def summary(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Medians, minima and maxima of the seconds, and ratios of medians to that of cp."""
    spread = {
        name: {"median": statistics.median(values), "min": min(values), "max": max(values)}
        for name in rounds[0]
        if (values := [seconds[name] for seconds in rounds])
    }
    over = {name: spread[name]["median"] / spread["cp"]["median"] for name in spread if name != "cp"}
    return {
        "hf_to_megatron_over_cp": over["hf_to_megatron_torch_dist"],
        "megatron_to_hf_over_cp": over["megatron_to_hf_torch_dist"],
        "over_cp": over,
        "seconds": spread,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "bench-convert", help="on the disk to measure")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    hf, work = arguments.work / "hf", arguments.work / "work"
    shutil.rmtree(arguments.work, ignore_errors=True)
    work.mkdir(parents=True)
    parameters = write_random_llama(hf)
    check_exact(hf, work)
    wanted = () if arguments.no_peers else peers.NAMES
    names = [name for name in wanted if peers.prepare(name) is not None]
    rounds: list[dict[str, float]] = []
    peer_runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for number in range(arguments.rounds):
        rounds.append(one_round(hf, work, 2 * parameters))
        print(number, {name: round(value, 2) for name, value in rounds[-1].items()}, flush=True)
        for name in names:
            if number < 3:
                level(work, 2 * parameters)
                peer_runs[name].append(peers.run(name, hf, work / name))
                shutil.rmtree(work / name, ignore_errors=True)
    peak = memory(hf, work)
    result = {
        **summary(rounds),
        "peak_anonymous_bytes": max(peak.values()),
        "peak_anonymous": peak,
        "model": {"parameters": parameters, "bytes": 2 * parameters, "largest_tensor_bytes": 2 * 64000 * 1536},
        "rounds": rounds,
        "peers": peer_runs,
        "peers_left_out": [name for name in wanted if name not in names],
        "machine": machine("make bench-convert"),
    }
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    shutil.rmtree(arguments.work)
    print(json.dumps({k: result[k] for k in ("hf_to_megatron_over_cp", "megatron_to_hf_over_cp", "over_cp")}, indent=2))
    print("peak anonymous bytes", result["peak_anonymous_bytes"])


if __name__ == "__main__":
    main()
