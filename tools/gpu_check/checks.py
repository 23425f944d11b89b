"""From what the ranks have shown to rows: each figure beside what it should be.

An error is |measured - expected| / max(|expected|, scale), with the figure's own scale: losses that are sums of both
signs nearly cancel, and what is left of them has the rounding of the terms.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarlhf.resume.points.point import find_points
from tools.gpu_check.cases import Job, Launch
from tools.gpu_check.memory import PhasePeak, compare
from tools.gpu_check.plan import UNCOUNTED
from tools.gpu_check.rows import Row, failed, judged

Stored = Mapping[str, Mapping[str, Sequence[float]]]
"""By job and figure."""
EXPECTED = Path(__file__).parent / "expected.json"

SCALES: Mapping[str, float] = {
    "loss": 1.0,
    "grad_norm": 0.1,
    "policy_loss": 1.0,
    "value_loss": 0.1,
    "kl": 0.1,
    "entropy": 1.0,
    "reward_mean": 1.0,
    "actor_grad_norm": 0.1,
    "critic_grad_norm": 0.1,
    "advantages": 1.0,
}
"""Figures that are compared, and below which size an error is no longer relative to them."""
LIMITS: Mapping[str, float] = {"fp32": 1e-4, "bf16": 0.2}
"""Of an error, by dtype. Both are stated with their reasons in docs/cluster.md."""
PROMPT_LIMITS: Mapping[str, float] = {"fp32": 1e-4, "bf16": 0.05}
"""The same of a run with shared prompts and one without, on one device."""
NEAR: Mapping[str, str] = {
    "kernels": "each within 4 times what torch in fp32 is off, or a rounding",
    "prompts": "each within 4 times what the row without sharing is off, or a rounding",
}
GAP_LIMITS: Mapping[str, float] = {"rollout_logprob_gap_mean": 0.02, "rollout_logprob_gap_p999": 0.25}
"""Nats, in bf16."""
RESUMED_LIMIT = 1e-5
"""Of an error, in fp32. On a CPU the bits are the same; kernels of a GPU may add in another order."""
POINTS = [(0, 1), (1, 0)]
MEMORY_LIMIT = 0.05
"""Of a phase's peak."""
CERTIFICATES = 2
"""At the start, and after the step."""


@dataclass(frozen=True)
class Figure:
    """Numbers of one job beside their stored ones: one of each step, or of each of some tokens."""

    job: str
    layers: str
    name: str
    measured: Sequence[float]
    expected: Sequence[float]

    @property
    def error(self) -> float:
        """The root of the mean square over the numbers: in bf16 a token whose expert changes is off by much alone."""
        if len(self.measured) != len(self.expected):
            return math.inf
        scale = SCALES[self.name]
        pairs = zip(self.measured, self.expected, strict=True)
        squares = [((measured - expected) / max(abs(expected), scale)) ** 2 for measured, expected in pairs]
        return math.sqrt(sum(squares) / len(squares))


def figures_of(result: Mapping[str, Any]) -> dict[str, list[float]]:
    """The numbers of a job that are compared, by name."""
    steps = [row for row in result["metrics"] if row["step"]]
    figures = {
        name: [math.nan if row[name] is None else row[name] for row in steps]
        for name in SCALES
        if all(name in row for row in steps)
    }
    return figures | ({"advantages": result["advantages"]} if result["advantages"] else {})


# --- parity ---------------------------------------------------------------------------------------


def parity(
    launch: Launch,
    results: Sequence[Mapping[str, Any]],
    expected: Stored,
    limits: Mapping[str, float] = LIMITS,
    where: str = "on a CPU",
) -> list[Row]:
    """A row for each dtype and kind of layers, with the worst figure, and one for each other that is off."""
    groups: dict[tuple[str, str], list[Figure]] = defaultdict(list)
    for result in results:
        groups[result["job"].split()[-1], result["layers"]] += _figures(result, expected)
    rows: list[Row] = []
    for (dtype, layers), figures in groups.items():
        figures.sort(key=lambda figure: (not math.isnan(figure.error), -figure.error))
        limit = limits[dtype]
        off = [figure for figure in figures if not figure.error <= limit]
        case = f"{launch.case} {dtype}" + (" local layers" if layers == "local" else "")
        for figure in off or figures[:1]:
            note = f"{figure.job}: {_shown(figure.measured)}, {where} {_shown(figure.expected)}"
            note += "" if off else f"; the worst of {len(figures)}"
            rows.append(judged(launch.check, case, figure.name, figure.error, limit, note))
    return rows


def _figures(result: Mapping[str, Any], expected: Stored) -> Iterator[Figure]:
    """One for each that is stored."""
    measured = figures_of(result)
    for name, values in expected[result["job"]].items():
        yield Figure(result["job"], result["layers"], name, measured.get(name, ()), values)


def _shown(values: Sequence[float]) -> str:
    """The first three."""
    return ", ".join(f"{value:.6g}" for value in values[:3]) + (", ..." if len(values) > 3 else "") or "nothing"


# --- resume ---------------------------------------------------------------------------------------


def resume(launch: Launch, results: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Steps after a resume point against those of a run that was never interrupted, and which points a step of PPO has
    left. A start that finds no resume point is refused: `unfinished` tells that."""
    by_job = {result["job"].split()[-1]: figures_of(result) for result in results}
    if not {"whole", "rest"} <= by_job.keys():
        return []
    figures = [
        Figure("resume", "auto", name, by_job["rest"].get(name, ()), values) for name, values in by_job["whole"].items()
    ]
    worst = max(figures, key=lambda figure: (math.isnan(figure.error), figure.error))
    note = f"{_shown(worst.measured)}, without a stop {_shown(worst.expected)}; the worst of {len(figures)}"
    rows = [judged(launch.check, launch.case, worst.name, worst.error, RESUMED_LIMIT, note)]
    inside = [job for job in launch.jobs if job.name == "resume inside" and "inside" in by_job]
    return rows + [_points(launch, Path(job.config["run"]["dir"])) for job in inside]


def _points(launch: Launch, run_dir: Path) -> Row:
    """Of a step with two updates and a resume point after each."""
    found = [(point.position.step, point.position.update) for point in find_points(run_dir)]
    note = f"(steps, updates) of the resume points: {found}, expected {POINTS}"
    return judged(launch.check, launch.case, "points that are missing", len(set(POINTS) - set(found)), 0, note)


# --- shared prompts -------------------------------------------------------------------------------


def prompts(launch: Launch, results: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Each job with shared prompts against the same without; and that it has shared some."""
    rows: list[Row] = []
    for layers in dict.fromkeys(result["layers"] for result in results):
        by_job = {result["job"]: result for result in results if result["layers"] == layers}
        unshared = {job: job.replace(" shared ", " unshared ") for job in by_job if " shared " in job}
        stored = {job: figures_of(by_job[other]) for job, other in unshared.items() if other in by_job}
        rows += parity(launch, [by_job[job] for job in stored], stored, PROMPT_LIMITS, "without sharing")
    for result in results:
        job, saved = result["job"], sum(row.get("prompts_saved") or 0 for row in result["metrics"])
        if (saved > 0) != (" shared " in job):
            rows.append(failed(launch.check, f"{launch.case}: {job}", f"{saved:g} prompts were shared"))
    return rows


# --- engine ---------------------------------------------------------------------------------------


def engine(launch: Launch, results: Sequence[Mapping[str, Any]], digests: Mapping[str, str]) -> list[Row]:
    """The gap, and whether the certificates are of the weights that they should be."""
    rows = []
    for result in results:
        step = result["metrics"][-1]
        for name, limit in GAP_LIMITS.items():
            value = step.get(name)
            rows.append(judged(launch.check, launch.case, name, math.nan if value is None else value, limit, "nats"))
        rows.append(_certificate(launch, result["certificates"], digests[result["job"]]))
    return rows


def _certificate(launch: Launch, certificates: Sequence[Mapping[str, Any]], digest: str) -> Row:
    """An engine's own comparison has passed, or there were no certificate; the digest says that what was compared is
    what every other layout starts from, and that the step has changed it."""
    case, found = launch.case, [each["digest"] for each in certificates]
    if len(found) != CERTIFICATES:
        return failed(launch.check, case, f"{len(found)} certificates, expected {CERTIFICATES}")
    if found[0] != digest:
        return failed(launch.check, case, f"certificate of the first weights: {found[0]}, on a CPU {digest}")
    if found[1] == found[0]:
        return failed(launch.check, case, f"the weights after the step are those before it: {found[0]}")
    note = f"the engine holds the actor's weights bit for bit, {digest} as on a CPU, and {found[1]} after the step"
    return Row(check=launch.check, case=case, figure="certificate", status="passed", note=note)


# --- memory ---------------------------------------------------------------------------------------


def memory(
    launch: Launch, result: Mapping[str, Any], rehearsed: Mapping[int, Sequence[PhasePeak]], limit: float = MEMORY_LIMIT
) -> list[Row]:
    """A row for the worst phase, and one for each other that is off."""
    if result["peaks"] is None:
        return [Row(check=launch.check, case=launch.case, status="skipped", note=UNCOUNTED)]
    measured = {int(rank): [PhasePeak(*peak) for peak in peaks] for rank, peaks in result["peaks"].items()}
    compared, missing = compare(measured, rehearsed)
    rows = [failed(launch.check, launch.case, sentence) for sentence in missing]
    if not compared:
        return [*rows, failed(launch.check, launch.case, "no phase was measured and rehearsed")]
    compared.sort(key=lambda each: -each.error)
    off = [each for each in compared if each.error > limit]
    for each in off or compared[:1]:
        note = f"{each.measured / 2**20:.1f} MiB measured, {each.rehearsed / 2**20:.1f} rehearsed, rank {each.rank}"
        note += "" if off else f"; the worst of {len(compared)}"
        rows.append(judged(launch.check, launch.case, f"{each.phase} of step {each.step}", each.error, limit, note))
    return rows


# --- kernels --------------------------------------------------------------------------------------


def kernels(case: str, checks: Sequence[Mapping[str, Any]], check_name: str = "kernels") -> list[Row]:
    """One row for all that passed, one for each of the others. `checks`: as benchmarks/gpu_check.py writes them."""
    passed = sum(check["passed"] is True for check in checks)
    rows = [
        Row(
            check=check_name,
            case=f"{case}: {check['check']}",
            status="skipped",
            note=check["reason"].removeprefix("skipped: "),
        )
        if check["passed"] is None
        else failed(check_name, f"{case}: {check['check']}", check["reason"])
        for check in checks
        if check["passed"] is not True
    ]
    if passed:
        note = NEAR[check_name]
        rows.insert(0, Row(check=check_name, case=case, figure=f"{passed} checks", status="passed", note=note))
    return rows or [failed(check_name, case, "nothing was checked")]


# --- a launch that did not come to its end --------------------------------------------------------


def unfinished(launch: Launch, results: Sequence[Mapping[str, Any]], status: str, log: Path) -> list[Row]:
    """A row for the job in which it ended, with the first error, and one for those that were not begun."""
    done = len(results)
    if done == len(launch.jobs):
        return [failed(launch.check, launch.case, f"after all jobs the ranks {status}; see {log}")] if status else []
    reports = [json.loads(path.read_text()) for path in log.parent.glob("failed.*.json")]
    first = min(reports, key=lambda report: report["when"], default=None)
    said = status if first is None else first["error"].splitlines()[0]
    rows = [failed(launch.check, f"{launch.case}: {_job(launch.jobs[done])}", f"{said}; see {log}")]
    for job in launch.jobs[done + 1 :]:
        rows.append(failed(launch.check, f"{launch.case}: {_job(job)}", "not begun, because of the failure before it"))
    return rows


def _job(job: Job) -> str:
    return job.name + (" local layers" if job.layers == "local" else "")


def load_expected(path: Path = EXPECTED) -> dict[str, Any]:
    """{"figures": by job and name, "digests": by job}."""
    tree: dict[str, Any] = json.loads(path.read_text())
    return tree
