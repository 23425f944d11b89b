"""A reward that hangs once, as a rule that calls a service may: `rule: benchmarks.faults.rules:hang_once`."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HANG_MARK = "FAULTS_HANG"
"""Set to a file: the rule hangs as long as it is there to be removed."""


def hang_once(prompt: str, response: str, fields: Mapping[str, Any]) -> float:
    """The length of the response; the first call after the file was made does not return."""
    file = os.environ.get(HANG_MARK)
    if file:
        try:
            Path(file).rename(f"{file}.happened")
        except FileNotFoundError:
            pass
        else:
            time.sleep(100000)
    return float(len(response))
