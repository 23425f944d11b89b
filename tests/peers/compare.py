"""How close two results must be; and, as a program, the record of what other projects gave.

`python -m tests.peers.compare` writes values.json, where `make test-peers` has installed the other projects.
"""

import importlib.metadata
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.peers.inputs import draw

VALUES = Path(__file__).with_name("values.json")
PACKAGES = ("trl", "verl", "openrlhf")
SEED = 2

TOLERANCES = {
    "verl: grpo": 2e-6,  # a response alone in its group: its reward over 1 + 1e-6, ours as it is
    "verl: sapo": 1e-7,  # its temperatures are fp32
    "trl: advantages, scale_rewards batch": 1e-7,  # its correction of the variance, n / (n - 1), is fp32
    "trl: advantages, normalize_then_sum": 1e-7,  # as above
    "verl: gdpo": 1e-6,  # in fp32
    "verl: overlong": 1e-6,  # in fp32
    "openrlhf: overlong": 1e-6,  # in fp32
    "openrlhf: group_norm with kl": 1e-6,  # as group_norm
    "trl: orpo": 1e-6,  # in fp32
    "openrlhf: gae": 1e-6,  # whitened in fp32, and the variance held at 1e-8 instead of raised by it
    "openrlhf: reinforce": 1e-6,
    "openrlhf: reinforce_baseline": 1e-6,
    "openrlhf: group_norm": 1e-6,  # in fp32
    "openrlhf: k1": 1e-6,
    "openrlhf: k2": 1e-6,
    "openrlhf: k3": 1e-6,
}
"""Where it is not 1e-8, the eps of verl's and OpenRLHF's means: with the reason."""


def assert_equal(name: str, ours: Sequence[float], theirs: Sequence[float]) -> None:
    """Both are fp64 but for rounding that the reasons above name."""
    tolerance = TOLERANCES.get(name, 1e-8)
    assert len(ours) == len(theirs)
    assert list(ours) == pytest.approx(list(theirs), rel=tolerance, abs=tolerance), name


def main() -> None:
    """Write values.json."""
    from tests.peers.theirs import THEIRS

    inputs = draw(SEED)
    values = {name: [float(f"{number:.12g}") for number in theirs(inputs)] for name, theirs in THEIRS.items()}
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    parts = {"versions": versions, "inputs": inputs.to_json(), "values": values}
    lines = [f'"{part}": {{\n' + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in tree.items()) + "\n}"
             for part, tree in parts.items()]  # fmt: skip
    VALUES.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
