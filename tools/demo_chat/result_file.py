"""The result file of `make demo-chat-seeds`: of one call, or added to that of calls before, as on other machines."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import ROOT, machine
from megarlhf.algo.intervals import mean_of
from megarlhf.resume.points.file_digest import digest_of_directory

COMMAND = "make demo-chat-seeds"
MODULES = "tools/demo_chat"
OF_THE_TASK = ("make_data.py", "tasks.py", "words.py", "*.txt")
SETTINGS = ("configs/demo-chat/*.yaml", *(f"{MODULES}/{each}" for each in OF_THE_TASK))
"""The files that say what is run, and on which data."""


def settings(model: Path, overrides: Sequence[str], variants: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """What calls must have in common, for their figures to stand in one table; `variants`: what differs in each."""
    changes = {name: list(each) for name, each in variants.items()}
    return {
        "model": model.name,
        "model_sha256": digest_of_directory(model),
        "overrides": list(overrides),
        "variants": changes,
        "files_sha256": files_digest(),
    }


def files_digest() -> str:
    """Of `SETTINGS`."""
    digest = hashlib.sha256()
    for pattern in SETTINGS:
        for path in sorted(ROOT.glob(pattern)):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def about(commits: Sequence[str]) -> dict[str, Any]:
    """This machine, and the commits with which the runs of a part were started."""
    return machine(COMMAND) | ({"commit": ", ".join(commits)} if commits else {})


def earlier(path: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What the file has; empty where there is none. Raises: ValueError where it is of other settings."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if found and found.get("settings") != settings:
        raise ValueError(
            f"{path} is of other settings ({found.get('settings')}; now {settings}): name another file by --out, or "
            "remove it"
        )
    return found


def added(before: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """`found`, with the seeds and parts that only `before` has; the summary is of all seeds."""
    seeds = {**before.get("seeds", {}), **found.get("seeds", {})}
    seeds = {seed: seeds[seed] for seed in sorted(seeds, key=int)}
    merged = {**before, **found, "about": {**before.get("about", {}), **found["about"]}}
    return merged | ({"seeds": seeds, "summary": over_seeds(list(seeds.values()))} if seeds else {})


def over_seeds(by_seed: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of each figure and each difference the seeds' values, and their mean with Student's interval over seeds."""
    return {
        kind: {
            name: {words: mean_over([each[kind][name][words]["value"] for each in by_seed]) for words in of}
            for name, of in by_seed[0][kind].items()
        }
        for kind in ("models", "checks", "differences")
    }


def mean_over(values: Sequence[float]) -> dict[str, Any]:
    estimate = mean_of(torch.tensor(values, dtype=torch.float64))
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high, "seeds": list(values)}
