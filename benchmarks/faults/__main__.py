"""Runs the trials that are missing, and writes the summary: python -m benchmarks.faults --help."""

from __future__ import annotations

import argparse
import json
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import megarlhf
from benchmarks.faults import conversation_faults, page, planted_faults, random_faults
from benchmarks.faults.record import Record, Result, summary
from benchmarks.faults.runs import Site, generator
from benchmarks.faults.trial import CannotHappen, NotHappened, Trial
from benchmarks.machine import ROOT, machine
from megarlhf.planning.machine.nodes import source_digest

ATTEMPTS = 8
CORES = 2
RESUMED, WENT_ON, REFUSED = (
    "the same command goes on and ends with equal metrics",
    "the run goes on by itself and ends with equal metrics",
    "refused with status 2 and every file as it was; then the right command goes on and ends with equal metrics",
)
WENT_ON_OR_RESUMED = "the run goes on by itself, or after a kill by the same command, and ends with equal metrics"
SECOND = "the second start is refused with status 2; the first run ends with equal metrics"
SINCE_POINT = "the work since the last resume point is done again; no response that the bank has is drawn again"
SINCE_TURN = f"{SINCE_POINT}, and no answered turn of a conversation"
OTHER_ENGINE = (
    "the same command with one engine of two ranks instead of two engines goes on and ends with equal metrics, but for "
    "those of the engine's own log-probs (`gap` or `correction` in their names)"
)
ONE_CONVERSATION = "one conversation, which begins anew"
BUT_REDRAWN = "but for `conversations_redrawn`"


@dataclass(frozen=True)
class Fault:
    """How often it is tried, on which runs, and what is expected."""

    run: Callable[[Trial], Result]
    trials: int
    cases: tuple[str, ...]
    recovered: str
    promised: str


_PPO = ("ppo", "ppo", "ppo", "ppo_vllm")
FAULTS = {
    "sigkill_sft": Fault(random_faults.sigkill, 40, ("sft", "sft_tp2", "sft"), RESUMED, SINCE_POINT),
    "sigkill_ppo": Fault(random_faults.sigkill, 20, _PPO, RESUMED, SINCE_POINT),
    "sigkill_slices": Fault(
        random_faults.sigkill, 17, ("slices", "slices", "slices", "slices_vllm"), RESUMED, SINCE_POINT
    ),
    "sigkill_newest_removed": Fault(random_faults.sigkill_newest_removed, 3, ("slices",), RESUMED, SINCE_POINT),
    "sigkill_ahead": Fault(random_faults.sigkill, 5, ("slices_ahead",), RESUMED, SINCE_POINT),
    "sigkill_while_writing": Fault(random_faults.sigkill_while_writing, 10, ("sft", "ppo"), RESUMED, SINCE_POINT),
    "corrupted_checkpoint": Fault(
        random_faults.corrupted,
        20,
        ("sft_keep",),
        RESUMED,
        "damaged points are passed over, the newest good is used",
    ),
    "signal_sft": Fault(random_faults.stop_signal, 10, ("sft", "sft_tp2"), RESUMED, "at most one optimizer step"),
    "signal_ppo": Fault(random_faults.stop_signal, 10, _PPO, RESUMED, "at most one optimizer step"),
    "rank_stopped": Fault(random_faults.rank_stopped, 10, ("sft_tp2",), RESUMED, SINCE_POINT),
    "writer_killed": Fault(random_faults.writer_killed, 10, ("sft", "sft_tp2"), WENT_ON, "nothing"),
    "launcher_killed": Fault(planted_faults.launcher_killed, 3, ("sft_tp2", "ppo"), RESUMED, SINCE_POINT),
    "disk_full": Fault(planted_faults.disk_full, 3, ("sft",), WENT_ON_OR_RESUMED, "nothing that was complete"),
    "read_only_directory": Fault(planted_faults.read_only_directory, 3, ("sft",), REFUSED, SINCE_POINT),
    "changed_data": Fault(planted_faults.changed_data, 3, ("sft",), REFUSED, SINCE_POINT),
    "changed_configuration": Fault(planted_faults.changed_configuration, 3, ("sft",), REFUSED, SINCE_POINT),
    "second_job": Fault(planted_faults.second_job, 3, ("sft", "grpo"), SECOND, "nothing"),
    "hanging_reward": Fault(planted_faults.hanging_reward, 3, ("grpo",), RESUMED, SINCE_POINT),
    "engine_exception": Fault(planted_faults.engine_exception, 3, ("ppo_vllm",), WENT_ON, "nothing"),
    "nan_gradient": Fault(
        planted_faults.nan_gradient,
        3,
        ("sft_nan",),
        "the step is skipped; equal to a run with the same NaN",
        "nothing",
    ),
    "time_limit": Fault(planted_faults.time_limit, 3, ("sft", "grpo"), RESUMED, "at most one optimizer step"),
    "sigkill_third_turn": Fault(conversation_faults.sigkill_third_turn, 10, ("talks",), RESUMED, SINCE_TURN),
    "sigkill_other_engine": Fault(
        conversation_faults.sigkill_other_engine, 10, ("talks_two",), OTHER_ENGINE, SINCE_TURN
    ),
    "sigkill_turn_slices": Fault(conversation_faults.sigkill_third_turn, 10, ("talks_slices",), RESUMED, SINCE_TURN),
    "environment_killed": Fault(
        conversation_faults.environment_killed, 10, ("talks",), f"{WENT_ON}, {BUT_REDRAWN}", "nothing"
    ),
    "environment_hangs": Fault(
        conversation_faults.environment_hangs, 10, ("talks",), f"{WENT_ON}, {BUT_REDRAWN}, which is 1", ONE_CONVERSATION
    ),
    "environment_exits": Fault(
        conversation_faults.environment_exits, 10, ("talks",), f"{WENT_ON}, {BUT_REDRAWN}, which is 1", ONE_CONVERSATION
    ),
    "environment_drifts": Fault(
        conversation_faults.environment_drifts,
        10,
        ("talks",),
        f"the turn is named; {RESUMED}, {BUT_REDRAWN}, which is 1",
        f"{SINCE_TURN}, but for the conversation that is named",
    ),
    "engine_exception_talks": Fault(
        conversation_faults.engine_exception_talks, 10, ("talks",), WENT_ON, "no answered turn of a conversation"
    ),
}


class Cores:
    """So many ranks may be at work at a time. Who asks for more than are free waits, and nobody passes him."""

    def __init__(self, number: int) -> None:
        self._free, self._turn, self._changed = number, threading.Lock(), threading.Condition()

    def take(self, number: int) -> None:
        with self._turn, self._changed:
            self._changed.wait_for(lambda: self._free >= number)
            self._free -= number

    def give_back(self, number: int) -> None:
        with self._changed:
            self._free += number
            self._changed.notify_all()


def trial(site: Site, name: str, number: int, keep: bool) -> Result | str:
    """One trial, at another moment when the fault came too late; or why there is none on this machine."""
    fault = FAULTS[name]
    case = site.case(fault.cases[number % len(fault.cases)])
    for attempt in range(ATTEMPTS):
        folder = site.root / "trials" / f"{name}-{number:02d}"
        made = Trial(site, case, generator(name, number, attempt), folder)
        started = time.monotonic()
        try:
            result = fault.run(made)
        except NotHappened:
            continue
        except CannotHappen as reason:
            return str(reason)
        except Exception as error:  # noqa: BLE001 -- a trial that breaks is a trial that failed
            result = Result("", recovered=False, problem=f"{type(error).__name__}: {error}")
        finally:
            made.end()
        result.seconds = round(time.monotonic() - started, 1)
        if result.recovered and not keep:
            shutil.rmtree(folder, ignore_errors=True)
        return result
    return Result("", recovered=False, problem=f"the fault did not happen in {ATTEMPTS} attempts")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build/faults", help="where runs and the record of trials lie"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/faults.json")
    parser.add_argument("--only", nargs="*", choices=FAULTS, default=list(FAULTS), help="these faults")
    parser.add_argument("--trials", type=int, help="of each fault at most so many")
    parser.add_argument("--keep", action="store_true", help="also keep the directories of trials that went well")
    parser.add_argument("--fresh", action="store_true", help="forget the trials that were done")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="try nothing: put the results into this page")
    arguments = parser.parse_args()
    if arguments.markdown:
        page.update(arguments.markdown, FAULTS)
        return
    planted_faults.unmount_leftovers(arguments.work / "trials")
    if arguments.fresh:
        shutil.rmtree(arguments.work, ignore_errors=True)
    arguments.work.mkdir(parents=True, exist_ok=True)
    sources = source_digest(Path(megarlhf.__file__).parent)
    site = Site(arguments.work, sources)
    site.prepare()
    record, skipped = Record(arguments.work / "trials.jsonl", sources), dict[str, str]()
    wanted = {name: min(FAULTS[name].trials, arguments.trials or 1000) for name in arguments.only}
    for case in sorted({case for name in wanted for case in FAULTS[name].cases}):
        print(f"undisturbed: {case}", flush=True)
        site.reference(site.case(case))

    missing = [(name, n) for name, number in wanted.items() for n in range(number) if (name, n) not in record.results]
    print(f"{sum(wanted.values()) - len(missing)} trials are done, {len(missing)} are missing", flush=True)
    cores, writing = Cores(CORES), threading.Lock()

    def work(name: str, number: int) -> None:
        ranks = site.case(FAULTS[name].cases[number % len(FAULTS[name].cases)]).ranks
        cores.take(ranks)
        try:
            result = trial(site, name, number, arguments.keep) if name not in skipped else skipped[name]
        finally:
            cores.give_back(ranks)
        with writing:
            if isinstance(result, str):
                skipped[name] = result
                return
            record.add(name, number, result)
            state = "recovered" if result.recovered else f"NOT RECOVERED: {result.problem}"
            print(f"{name} {number + 1}: {state} ({result.seconds:.0f} s; {result.happened})", flush=True)

    with ThreadPoolExecutor(CORES) as pool:
        for future in [pool.submit(work, name, number) for name, number in missing]:
            future.result()
    write(arguments.out, record, skipped)


def write(out: Path, record: Record, skipped: dict[str, str]) -> None:
    """The summary by fault, of all trials that are on record. A fault that was not tried with these sources keeps its
    earlier results, with their commit."""
    about = machine("make test-faults")
    earlier = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"faults": {}}
    faults = {
        name: {**summary(results, fault.recovered, fault.promised), "commit": about["commit"]}
        if (results := record.of(name))
        else {"commit": earlier["commit"], **earlier["faults"][name]}
        for name, fault in FAULTS.items()
        if record.of(name) or name in earlier["faults"]
    }
    out.write_text(json.dumps({**about, "faults": faults, "skipped": skipped}, indent=1) + "\n", encoding="utf-8")
    print(f"\n{'fault':24}{'trials':>8}{'recovered':>11}{'equal':>8}{'done again':>12}{'beyond':>8}")
    for name, found in faults.items():
        equal = "" if found["metrics_equal"] is None else f"{found['metrics_equal']}/{found['compared']}"
        again = f"{found['steps_lost']['most']} ({found['steps_lost']['mean']})"
        print(f"{name:24}{found['trials']:>8}{found['recovered']:>11}{equal:>8}{again:>12}{found['beyond_promise']:>8}")
    for name, reason in skipped.items():
        print(f"{name:24} skipped: {reason}")
    print(out)


if __name__ == "__main__":
    main()
