"""The first hour on a cluster, as one command: `make test-gpu`.

    python -m tools.gpu_check --out build/gpu_check              # all checks that this machine has enough GPUs for
    python -m tools.gpu_check --out DIR --only sft,ppo           # some of them
    python -m tools.gpu_check --out DIR --cpu 4                  # the same over gloo on a CPU, with up to 4 ranks
    python -m tools.gpu_check --make-expected                    # the CPU's results anew: tools/gpu_check/expected.json

Ends with a table; the exit status is 0 where nothing failed, 1 where something did, 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from megarlhf.runtime import Capabilities, capabilities
from tools.gpu_check import checks
from tools.gpu_check.cases import DTYPES, PACKED, Launch, engine_job, ppo_job, sft_job, write_inputs
from tools.gpu_check.plan import CHECKS, Machine, launches
from tools.gpu_check.rows import Row, exit_status, failed, show, write
from tools.gpu_check.start import ROOT, Processes, Start, log_of, results_of

KERNEL_CHECKS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "kernels": {
        "log-probs": ("benchmarks.gpu_logprob", "--check"),
        "packed rows": ("benchmarks.gpu_packed", "--check"),
    },
    "prompts": {"attention": ("tools.gpu_check.prompts",)},
}
"""By check and case: a module that compares with fp64, and words for it."""
KERNEL_SECONDS = 600


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "build" / "gpu_check",
        help="what it writes: a new folder, an empty one, or that of an earlier check, which is emptied first",
    )
    parser.add_argument("--only", default=",".join(CHECKS), help=f"of {','.join(CHECKS)}")
    parser.add_argument("--gpus", type=int, help="use so many of each node's")
    parser.add_argument("--srun", default="", help="words that start ranks on a job's nodes: slurm/test-gpu.sbatch")
    parser.add_argument("--cpu", type=int, metavar="RANKS", help="on a CPU over gloo, with up to so many ranks")
    parser.add_argument("--make-expected", action="store_true", help="write the CPU's results anew")
    arguments = parser.parse_args(argv)
    arguments.only = arguments.only.split(",")
    if unknown := sorted(set(arguments.only) - set(CHECKS)):
        parser.error(f"--only {','.join(unknown)}: the checks are {', '.join(CHECKS)}")
    return arguments


def machine_of(arguments: argparse.Namespace, found: Capabilities) -> Machine:
    """Raises: ValueError, in a sentence for the user, where there is no GPU."""
    if arguments.cpu:
        return Machine(gpus_per_node=arguments.cpu, on_gpus=False)
    if not found.device_count:
        raise ValueError(
            "torch sees no GPU on this machine, and this is a test of GPUs; run it on a node that has some "
            "(docs/cluster.md, The first hour), or try its logic with python -m tools.gpu_check --cpu 2"
        )
    nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", "1")) if arguments.srun else 1
    return Machine(
        gpus_per_node=arguments.gpus or found.device_count,
        nodes=nodes,
        transformer_engine=found.versions["transformer-engine"] is not None,
    )


# --- the checks -----------------------------------------------------------------------------------


def run_launch(launch: Launch, out: Path, start: Start, expected: dict[str, Any], machine: Machine) -> list[Row]:
    """Start it, and judge what came back."""
    path = launch.dump(out)
    status = start(launch, path)
    results = results_of(path)
    rows: list[Row] = []
    if launch.check in ("sft", "ppo"):
        rows = checks.parity(launch, results, expected["figures"])
    elif launch.check == "resume":
        rows = checks.resume(launch, results)
    elif launch.check == "prompts":
        rows = checks.prompts(launch, results)
    elif launch.check == "engine":
        rows = checks.engine(launch, results, expected["digests"])
    elif results:
        rows = _memory(launch, path, results[0], machine)
    return rows + checks.unfinished(launch, results, status, log_of(path))


def _memory(launch: Launch, path: Path, result: dict[str, Any], machine: Machine) -> list[Row]:
    if result["peaks"] is None:
        return checks.memory(launch, result, {})
    # Here, and not above: a machine without GPUs is told so at once.
    from tools.gpu_check.rehearse import rehearsed_peaks

    layers: Literal["te", "local"] = "te" if machine.transformer_engine else "local"
    try:
        rehearsed = rehearsed_peaks(path, launch, "gpu" if machine.on_gpus else "cpu", layers)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return [failed(launch.check, launch.case, str(error))]
    return checks.memory(launch, result, rehearsed)


def kernel_rows(check_name: str, out: Path, on_gpu: bool) -> list[Row]:
    """What a check compares with fp64, each case in a process: one may lose the device."""
    rows: list[Row] = []
    for case, (module, *words) in KERNEL_CHECKS[check_name].items():
        path = out / "kernels" / f"{module}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", module, *words, "--out", str(path), "--limit", str(KERNEL_SECONDS)]
        with path.with_suffix(".log").open("w") as log:
            try:
                status = subprocess.run(
                    command + ([] if on_gpu else ["--rehearse"]),
                    cwd=ROOT,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    timeout=KERNEL_SECONDS + 60,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                status = -1
        found = json.loads(path.read_text()).get("checks", []) if path.is_file() else []
        rows += checks.kernels(case, found, check_name)
        if status and not any(check["passed"] is False for check in found):
            rows.append(failed(check_name, case, f"ended with exit status {status}; see {path.with_suffix('.log')}"))
    return rows


# --- the command ----------------------------------------------------------------------------------


def make_expected(start: Start) -> None:
    """Run every job on one rank of a CPU and store its figures. Raises: RuntimeError where one fails."""
    with tempfile.TemporaryDirectory(prefix="gpu_check-") as directory:
        out = Path(directory)
        inputs = write_inputs(out / "inputs")
        parity = [
            make(inputs, out / "run", model, dtype, {})
            for make in (sft_job, ppo_job)
            for model in PACKED
            for dtype in DTYPES
        ]
        launch = Launch(check="expected", case="parity", ranks=1, jobs=parity)
        engine = Launch(check="expected", case="engine", ranks=1, jobs=[engine_job(inputs, out / "engine", {}, 1)])
        results: list[dict[str, Any]] = []
        for each in (launch, engine):
            path = each.dump(out)
            if status := start(each, path):
                raise RuntimeError(f"the ranks of {each.case} {status}:\n{log_of(path).read_text()[-4000:]}")
            results += results_of(path)
    of_engine = [result for result in results if result["certificates"]]
    figures = {result["job"]: checks.figures_of(result) for result in results if result not in of_engine}
    found = capabilities()
    tree = {
        "made_by": "python -m tools.gpu_check --make-expected",
        "about": {"device": found.device_name, "python": platform.python_version(), "torch": found.versions["torch"]},
        "figures": {
            job: {name: [float(f"{value:.9g}") for value in values] for name, values in each.items()}
            for job, each in figures.items()
        },
        "digests": {result["job"]: result["certificates"][0]["digest"] for result in of_engine},
    }
    checks.EXPECTED.write_text(json.dumps(tree, indent=1) + "\n")


MARK = ".megarlhf-gpu-check"
"""A file that says whose a folder is."""


def empty(out: Path) -> None:
    """Remove what an earlier check has left in `out`. Raises: ValueError where something else is there."""
    if out.exists() and not (out.is_dir() and ((out / MARK).is_file() or not any(out.iterdir()))):
        raise ValueError(
            f"{out} is there and is no folder of an earlier check, so nothing in it is removed; name a new or empty "
            "folder (--out DIR)"
        )
    if out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True)
    (out / MARK).touch()


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    arguments = parsed(sys.argv[1:] if argv is None else argv)
    hidden = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    if arguments.make_expected:
        make_expected(Processes(environment=hidden))
        return 0
    found = capabilities()
    try:
        machine = machine_of(arguments, found)
    except ValueError as error:
        print(f"make test-gpu: {error}", file=sys.stderr)
        return 2
    out = arguments.out.absolute()
    try:
        empty(out)
    except ValueError as error:
        print(f"make test-gpu: {error}", file=sys.stderr)
        return 2
    start = Processes(shlex.split(arguments.srun), {} if machine.on_gpus else hidden)
    began = time.monotonic()
    planned, rows = launches(machine, arguments.only, write_inputs(out / "inputs"), out)
    expected = checks.load_expected()
    for check_name in (name for name in KERNEL_CHECKS if name in arguments.only):
        print(f"{check_name} ...", flush=True)
        rows += kernel_rows(check_name, out, machine.on_gpus)
    for number, launch in enumerate(planned, 1):
        print(f"{number} of {len(planned)}: {launch.check} {launch.case}, {launch.ranks} rank(s) ...", flush=True)
        rows += run_launch(launch, out, start, expected, machine)
    rows.sort(key=lambda row: (CHECKS.index(row.check), row.status == "skipped"))
    about = {
        "device": f"{machine.gpus_per_node} x {found.device_name}" if machine.on_gpus else found.device_name,
        "nodes": machine.nodes,
        "versions": dict(found.versions),
        "python": platform.python_version(),
        "command": shlex.join(["python", "-m", "tools.gpu_check", *(sys.argv[1:] if argv is None else argv)]),
        "seconds": round(time.monotonic() - began),
    }
    write(out / "gpu_check.json", about, rows)
    show(rows)
    print(f"{about['device']}, {about['seconds']} s; everything that was written lies in {out}")
    return exit_status(rows)


if __name__ == "__main__":
    sys.exit(main())
