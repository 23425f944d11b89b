"""`make bench-parallel` in small: what real ranks say to each other is the formula, to the message and to the byte.

Not covered: the layouts that are not here, which the benchmark itself runs.
"""

from dataclasses import replace

import pytest

from benchmarks import parallel
from benchmarks.parallel_formula import DIFFERENCES, terms
from megarlhf.parallel.mesh import forget_scratch_buffer

BY_NAME = {each.name: each for each in parallel.LAYOUTS}


@pytest.mark.parametrize("name", ["TP2 SP", "EP2", "DP2, plain optimizer"])
def test_real_ranks_say_what_the_formula_says(name, ranks, tmp_path) -> None:
    """And a message that is left out of what was counted is missed."""
    measured = replace(BY_NAME[name], layers=1, micro_batches=2)
    seen = ranks.run(2, parallel.count_rank, measured.job(tmp_path / "job"))
    forget_scratch_buffer()
    assert parallel.unexplained(measured, seen) == []
    missed = "all_gather" if measured.distributed else "all_reduce"
    heard = next(message for message in seen[1].counts if (message.operation, message.step) == (missed, 2))
    seen[1].counts[heard] -= 1
    (line,) = parallel.unexplained(measured, seen)
    assert line.startswith(f"rank 1, {missed} in (0, 1)")


def test_the_formulas_by_hand() -> None:
    """Four micro-batches of 768 tokens, 512 of them of responses; four layers, hidden 256, 512 words, fp32."""
    grid = 768 * 256 * 4
    of_tensor = {term.name: term for term in terms(BY_NAME["TP2"].work(), BY_NAME["TP2"].layout(), 0)}
    assert (of_tensor["layers"].known, of_tensor["layers"].known_bytes) == (4 * 4 * 4, 4 * 4 * 4 * grid)
    head = of_tensor["gradient of the head's input"]
    assert (head.ours, head.ours_bytes, head.known_bytes) == (4, 4 * 512 * 256 * 4, 4 * grid)
    # A stage sends each micro-batch on once for each of its two chunks, but for what the last one makes, and receives
    # as many gradients; from the other side the same.
    interleaved = BY_NAME["PP2 VPP2"]
    sent = [term for term in terms(interleaved.work(), interleaved.layout(), 1) if term.operation == "send"]
    assert sum(term.ours for term in sent) == 4 * (1 + 2)
    assert {term.ours_bytes // term.ours for term in sent} == {grid}


def test_each_difference_has_a_reason_and_each_reason_a_difference() -> None:
    named = set()
    for each in parallel.LAYOUTS:
        for rank in each.layout().mesh.ranks:
            named |= {term.name for term in terms(each.work(), each.layout(), rank) if term.differs}
    assert named == DIFFERENCES.keys()
