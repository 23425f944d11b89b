"""The invariance matrix: the numbers of a training do not depend on how it is cut, kept or computed.

A spread of it is in the default tests, all of it in `make test-matrix`, which also writes down what it has measured.
Not covered: NCCL, TransformerEngine's kernels and fusions, which need a GPU (docs/invariance.md).
"""

import functools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.invariance import (
    BANDS,
    BOUNDS,
    LAYOUTS,
    NO_BONUS,
    ONE_WITH_EXPERTS,
    OTHER_CHOICES,
    OTHER_CHOICES_BF16,
    VARIANTS,
    Cell,
    Matrix,
    Sources,
    assert_same_bits,
    bf16_cells,
    bf16_deviations,
    cells,
    deviations,
    policy_loss_deviations,
    reference,
)
from tests.distributed.invariance_record import write_record
from tests.distributed.test_packed_layouts import write_ragged
from tests.distributed.tiny import write_family

SPREAD = {
    Cell("sft", "TP4", "packed"), Cell("sft", "PP4", "tied"), Cell("sft", "DP4", "no overlap"),
    Cell("sft", "VPP2", "packed"), Cell("sft", "TP2 x CP2", "padded"), Cell("ppo", "CP2", "packed"),
    Cell("ppo", "TP2", NO_BONUS), Cell("rm", "TP2 x PP2, VPP2", "padded"), Cell("sft", "SP", "core_attention"),
    Cell("sft", "TP2", "optimizer distributed"), Cell("sft", "EP2", "optimizer not distributed"),
    Cell("rm", "PP2", "layers"), Cell("rm", "DP2", "streamed"), Cell("rm", "experts, TP2 with SP", "packed"),
    Cell("rm", "TP2 x DP2", "optimizer not distributed"), Cell("ppo", "PP2 x DP2", "offloaded"),
    Cell("ppo", "DP2", "all of it"), Cell("grpo", "TP2 x PP2", "full"), Cell("grpo", "EP2 x TP2", "padded"),
}  # fmt: skip
"""Each layout, each algorithm and each variant at least once."""
BF16_SPREAD = {
    Cell("sft", "TP2 x PP2, VPP2", dtype="bf16"), Cell("rm", "EP2", dtype="bf16"), Cell("ppo", "DP2", dtype="bf16"),
    Cell("grpo", "PP2", dtype="bf16"),
}  # fmt: skip


def with_marks(all_cells: Iterable[Cell], spread: set[Cell]) -> list[Any]:
    found = list(all_cells)
    assert spread <= set(found)
    return [pytest.param(cell, id=str(cell), marks=[] if cell in spread else pytest.mark.matrix) for cell in found]


@pytest.fixture(scope="module")
def matrix(ranks, models, tmp_path_factory) -> Iterator[Matrix]:
    root = tmp_path_factory.mktemp("invariance")
    known = {f"dense {name}": models[model] for name, model in DENSE.items()}

    @functools.cache
    def data(seed: int) -> dict[str, Path]:
        (directory := root / f"data_{seed}").mkdir()
        return write_ragged(directory, seed=seed + 7)

    known |= {
        f"experts {name}": write_family(
            root / name, "qwen3_moe", seed=EXPERT_SEED + n, tie_word_embeddings=name == "tied", scalar=name == "scorer"
        )
        for n, name in enumerate(DENSE)
    }
    matrix = Matrix(ranks, Sources(known, data), root / "runs")
    yield matrix
    if path := os.environ.get("INVARIANCE_RECORD"):
        write_record(matrix, Path(path))


DENSE = {"untied": "plain", "tied": "tied", "other": "other", "scorer": "scorer"}
EXPERT_SEED = 4
"""No choice of an expert is a near one: see `test_no_choice_of_experts_is_a_matter_of_rounding`."""


@pytest.mark.parametrize("cell", with_marks(cells(), SPREAD))
def test_as_in_one_process(cell, matrix) -> None:
    """Losses, norms, each gradient of the first update, each weight after three; to the bit where only memory or what
    is computed again differs from another run at the same layout."""
    layout, variant = LAYOUTS[cell.layout], VARIANTS[cell.variant]
    actual = matrix.run(cell)
    found = matrix.measured[cell] = deviations(actual, matrix.reference(cell), variant.small_loss)
    assert matrix.share_of_other_choices(cell) <= OTHER_CHOICES, f"{cell}: {matrix.choices[cell]} of experts"
    over = {kind: value for kind, value in found.items() if not value <= BOUNDS[kind]}
    assert not over, f"{cell}: {over} above {BOUNDS}"
    if cell.variant == NO_BONUS:
        found |= policy_loss_deviations(actual, matrix.reference(cell))
    for role, norms in actual.norms.items():  # what was looked at is what the run tells
        told = actual.metrics.get(f"{role}_grad_norm", actual.metrics.get("grad_norm"))
        assert told == (norms[-1] if "grad_norm" in actual.metrics else pytest.approx(sum(norms) / len(norms)))
    for how in actual.how.values():
        assert how == variant.how(layout)
    assert (actual.host_bytes > 0) == ("offload" in (variant.role or {}))
    if variant.exact:
        assert_same_bits(actual, matrix.run(Cell(cell.algorithm, cell.layout)))


@pytest.mark.parametrize("cell", with_marks(bf16_cells(), BF16_SPREAD))
def test_bf16_is_within_its_band(cell, matrix) -> None:
    """Of fp32 in one process on the same data; and it is bf16."""
    found = matrix.measured[cell] = bf16_deviations(matrix.run(cell), matrix.reference(cell))
    band = BANDS[LAYOUTS[cell.layout].model, cell.algorithm]
    assert matrix.share_of_other_choices(cell) <= OTHER_CHOICES_BF16, f"{cell}: {matrix.choices[cell]} of experts"
    assert all(1e-5 < value <= band[kind] for kind, value in found.items()), f"{cell}: {found}, the band is {band}"


def test_no_choice_of_experts_is_a_matter_of_rounding(matrix) -> None:
    """An expert is chosen where its logit is among the largest. The nearest decision of all stands as it is by far more
    than layouts change it: ten times. Where a decision is nearer than rounding, layouts may choose differently."""
    compared = 0
    for cell in [cell for cell in SPREAD if LAYOUTS[cell.layout].model == "experts"]:
        gap, wanted = matrix.run(cell).router_gap, matrix.reference(cell).router_gap
        assert gap > 10 * abs(gap - wanted), f"{cell}: {gap} against {wanted}"
        compared += 1
    assert compared >= 3


def test_the_spread_has_everything() -> None:
    assert {cell.algorithm for cell in SPREAD} == {cell.algorithm for cell in cells()}
    assert {cell.layout for cell in SPREAD} == {name for name, layout in LAYOUTS.items() if layout.ranks > 1}
    seen = {cell.variant for cell in SPREAD} | {reference(cell).variant for cell in SPREAD}
    assert seen == VARIANTS.keys()
    assert ONE_WITH_EXPERTS in {reference(cell).layout for cell in SPREAD}
