"""Our functions against the numbers that those of verl, OpenRLHF and TRL gave on the same ragged inputs.

The numbers stand in values.json, with the versions that gave them; `make test-peers` writes them anew and compares live
on other inputs. Not covered: what a peer has in no function that runs on a CPU (docs/algorithms.md says which).
"""

import json

import pytest
import torch

from tests.peers.compare import VALUES, assert_equal
from tests.peers.inputs import Inputs
from tests.peers.ours import OURS

RECORD = json.loads(VALUES.read_text())


def test_every_comparison_has_its_numbers():
    assert set(RECORD["values"]) == set(OURS)
    assert len(OURS) == 78
    inputs = Inputs.from_json(RECORD["inputs"])
    assert len(set(inputs.lengths_N.tolist())) > 4, "ragged"
    moved_T = inputs.tokens(inputs.logprobs_NT - inputs.old_logprobs_NT).exp()
    assert ((moved_T < 0.8) | (moved_T > 1.3)).any(), "some ratios are clipped"
    assert (moved_T > 3).any(), "beyond the dual clip too"


@pytest.mark.parametrize("name", OURS)
def test_ours_equals_theirs(name):
    inputs = Inputs.from_json(RECORD["inputs"])
    values = RECORD["values"][name]
    assert any(abs(number) > 1e-3 for number in values)
    assert_equal(name, OURS[name](inputs), values)


def test_a_difference_would_be_seen():
    inputs = Inputs.from_json(RECORD["inputs"])
    with pytest.raises(AssertionError):
        assert_equal("verl: rloo", (torch.tensor(OURS["verl: rloo"](inputs)) * 1.001).tolist(),
                     RECORD["values"]["verl: rloo"])  # fmt: skip
