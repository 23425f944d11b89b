"""Everything that a rehearsal says, held against what can be measured here: `make bench-rehearsal`.

Writes benchmarks/results/rehearsal.json: `memory_error_max`, `wire_mismatches`, `time_error_median`, and `scale` by
configuration. An hour on two cores; `--only` measures parts of it and keeps the others.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT, machine
from benchmarks.rehearsal import scale, time, truth

RESULTS = ROOT / "benchmarks" / "results" / "rehearsal.json"
PARTS = ("truth", "time", "scale")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    words = "of the large jobs these only"
    parser.add_argument(
        "--large", nargs="+", choices=tuple(scale.CONFIGURATIONS), default=scale.CONFIGURATIONS, help=words
    )
    words = "of the small jobs those whose name contains this; the others are kept"
    parser.add_argument("--cases", default="", metavar="TEXT", help=words)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    if arguments.out.is_file():
        found = json.loads(arguments.out.read_text(encoding="utf-8"))
    about = machine("python -m benchmarks.rehearsal")
    if "truth" in arguments.only:
        compared = [truth.measure(case) for case in truth.CASES if arguments.cases in case.name]
        rows = {name: {**row, "commit": about["commit"]} for name, row in truth.outcome(compared).items()}
        known = found.get("truth", {}) if arguments.cases else {}
        found |= truth.summary({**known, **rows}) | {"truth_machine": about}
    if "time" in arguments.only:
        found |= time.outcome() | {"time_machine": about}
    if "scale" in arguments.only:
        measured = found.get("scale", {}) | scale.measure(arguments.large)
        found |= {"scale": {name: measured[name] for name in scale.CONFIGURATIONS if name in measured}}
        found |= {"scale_machine": about}
    arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print({key: value for key, value in found.items() if not isinstance(value, list | dict)})


if __name__ == "__main__":
    main()
