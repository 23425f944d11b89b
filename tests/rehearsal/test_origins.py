"""Where memory is made: the program's line, and what kind it is."""

import re
from pathlib import Path

import pytest
import torch

import megarlhf.algo.losses
from megarlhf.parallel.megatron_cpu import megatron_device
from megarlhf.rehearsal.fake_device.origins import KINDS, OTHERS, PACKAGE, _look
from tests.rehearsal.devices import a_device, unknown


def made_in(file: str, function: str, line: int) -> object:
    """A function that makes a tensor in this line of a file of ours, as the frames tell it."""
    names: dict[str, object] = {"unknown": unknown, "torch": torch}
    exec(compile("\n" * (line - 2) + f"def {function}():\n    return unknown(4) * 2\n", file, "exec"), names)
    return names[function]


@pytest.mark.parametrize("scope", [False, True])
def test_the_line_of_the_program_and_the_kind_of_its_place(scope) -> None:
    """Also inside the scope in which Megatron-Core runs without CUDA, through which all calls of torch go."""
    make = made_in(megarlhf.algo.losses.__file__ or "", "token_nll", 40)
    with a_device() as device:
        if scope:
            with megatron_device(device.device):
                kept = make()  # type: ignore[operator]
        else:
            kept = make()  # type: ignore[operator]
        (storage,) = device.ledger.live.values()
    assert kept.shape == (4,)
    assert storage.origin.where == "megarlhf/algo/losses.py:40 in token_nll"
    assert storage.origin.kind == "experience"


def test_what_nothing_of_ours_makes_is_of_the_phase() -> None:
    """`train` has activations; Autograd's backward has no frame of the program on a device that is no CPU."""
    with a_device() as device:
        kept = unknown(4) * 2
        (storage,) = device.ledger.live.values()
    assert kept.shape == (4,)
    assert storage.origin.kind == "activations"
    assert "megarlhf/" not in storage.origin.where


@pytest.mark.parametrize("entry", [entry for entry in KINDS if entry[0].startswith("megarlhf/")])
def test_places_of_kinds_are_there(entry) -> None:
    """A file or function that was renamed would count as something else."""
    part, function, kind = entry
    place = Path(PACKAGE).parent / part
    assert place.exists()
    if function:
        assert re.search(rf"def {function}\b", place.read_text())
    assert kind != OTHERS


def test_the_innermost_entry_wins() -> None:
    expected = ("megarlhf/models/build.py", "parameters", False)
    assert _look(str(Path(PACKAGE) / "models" / "build.py"), "_build_chunk") == expected
