"""Our functions against those of verl, OpenRLHF and TRL, called here: `make test-peers`."""

import json

import pytest

from tests.peers.compare import VALUES, assert_equal
from tests.peers.inputs import Inputs, draw
from tests.peers.ours import OURS
from tests.peers.theirs import THEIRS

pytestmark = pytest.mark.peers


def test_both_sides_have_the_same_names():
    assert set(OURS) == set(THEIRS)


@pytest.mark.parametrize("name", THEIRS)
def test_ours_equals_theirs_on_random_inputs(name):
    for seed in range(10):
        inputs = draw(seed)
        assert_equal(name, OURS[name](inputs), THEIRS[name](inputs))


@pytest.mark.parametrize("name", THEIRS)
def test_the_recorded_numbers_are_theirs(name):
    record = json.loads(VALUES.read_text())
    assert_equal(name, THEIRS[name](Inputs.from_json(record["inputs"])), record["values"][name])
