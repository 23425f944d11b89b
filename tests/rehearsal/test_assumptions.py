"""Numbers that a rehearsal cannot know are answered from a list, counted with their line, or end it."""

import re
from pathlib import Path

import pytest
import torch

import megarlhf.algo.losses
from megarlhf.parallel import step
from megarlhf.rehearsal.fake_device.assumptions import SITES, Assumptions, Site, UnknownNumber
from megarlhf.trainers.rl import kl_controller
from tests.refuses import refuses
from tests.rehearsal.devices import a_device, unknown

PACKAGE = Path(megarlhf.__file__).parent


def as_if_in(module_file: str | None, name: str, body: str) -> object:
    """A function `name` whose code stands in the file of one of our modules, as the frames tell it."""
    assert module_file is not None
    names: dict[str, object] = {"torch": torch}
    exec(compile(f"def {name}(tensor):\n    {body}\n", module_file, "exec"), names)
    return names[name]


def test_a_read_that_is_not_listed_ends_the_rehearsal_with_file_and_line() -> None:
    """As a branch on it, as a number, as a copy to the host."""
    for body in ("return 1 if tensor[0] > 0 else 2", "return tensor[0].item()", "return tensor.cpu()"):
        steer = as_if_in(megarlhf.algo.losses.__file__, "steer", body)
        with a_device() as device, refuses("megarlhf/algo/losses.py:2 in steer", error=UnknownNumber):
            steer(unknown(2))  # type: ignore[operator]
        assert not device.assumptions.counts


def test_a_listed_read_is_answered_and_counted() -> None:
    """`trainers/rl/kl_controller.py`, whose answer is 0; twice on one line is one entry with its count."""
    read = as_if_in(kl_controller.__file__, "read", "return tensor[0].item()")
    with a_device() as device:
        assert [read(unknown(2)), read(unknown(2))] == [0.0, 0.0]  # type: ignore[operator]
    ((assumption, count),) = device.assumptions.counts.items()
    assert count == 2
    assert assumption.where == "megarlhf/trainers/rl/kl_controller.py:2 in read"
    assert (assumption.answer, "KL" in assumption.reason) == ("0.0", True)


def test_what_a_listed_function_calls_elsewhere_is_not_listed() -> None:
    """A loss runs inside `accumulate`, whose own sums are listed; so does a helper of the same file."""
    read = "return tensor.item()"
    loss, helper = (as_if_in(file, "read", read) for file in (megarlhf.algo.losses.__file__, step.__file__))
    accumulate = as_if_in(step.__file__, "accumulate", "return run(tensor)")
    with a_device() as device:
        accumulate.__globals__["run"] = loss  # type: ignore[attr-defined]
        with refuses("megarlhf/algo/losses.py:2 in read", error=UnknownNumber):
            accumulate(unknown())  # type: ignore[operator]
        accumulate.__globals__["run"] = helper  # type: ignore[attr-defined]
        assert accumulate(unknown()) == 1.0  # type: ignore[operator]
    ((assumption, _),) = device.assumptions.counts.items()
    assert assumption.where == "megarlhf/parallel/step.py:2 in read"


def test_a_known_number_needs_no_answer() -> None:
    read = as_if_in(megarlhf.algo.losses.__file__, "read", "return tensor.sum().item()")
    with a_device() as device:
        assert read(torch.tensor([2, 3]).to(torch.device("cpu", 0))) == 5  # type: ignore[operator]
    assert not device.assumptions.counts


def test_asking_for_nan_is_answered_and_counted_anywhere() -> None:
    ask = as_if_in(megarlhf.algo.losses.__file__, "ask", "return bool(tensor.isnan().any())")
    with a_device() as device:
        assert ask(unknown(3)) is False  # type: ignore[operator]
    ((assumption, _),) = device.assumptions.counts.items()
    assert assumption.where == "megarlhf/algo/losses.py:2 in ask"
    assert "finite" in assumption.reason


def test_the_first_site_that_fits_answers_from_the_innermost_frame() -> None:
    sites = (Site("algo/losses.py", "inner", 3.0, "inner"), Site("algo/losses.py", "", 4.0, "any"))
    inner = as_if_in(megarlhf.algo.losses.__file__, "inner", "return tensor.item()")
    other = as_if_in(megarlhf.algo.losses.__file__, "other", "return tensor.item()")
    with a_device(sites):
        assert (inner(unknown()), other(unknown())) == (3.0, 4.0)  # type: ignore[operator]


@pytest.mark.parametrize("site", SITES, ids=lambda site: f"{site.file}:{site.function}")
def test_every_site_is_a_place_that_is_there(site) -> None:
    """A function that was renamed would end every rehearsal; one that is gone would hide that nothing is assumed."""
    if site.file.startswith("megatron/"):
        import megatron.core

        root = Path(next(iter(megatron.core.__path__))).parents[1]
    else:
        root = PACKAGE
    path = root / site.file
    assert path.exists(), f"{path} is not there"
    if site.function:
        assert re.search(rf"def {site.function}\b", path.read_text())
    assert site.reason


def test_no_assumption_without_a_frame_of_ours() -> None:
    with pytest.raises(UnknownNumber):
        Assumptions(()).number("a number")
