"""The check `prompts` of `make test-gpu` on a CPU, and that it finds what is planted.

Not covered: the kernels of a GPU.
"""

import json

import pytest
import torch
from torch import Tensor

from megarlhf.models.attention import tree as tree_attention
from tests.distributed.gpu_check_jobs import PoolStart
from tools.gpu_check import __main__ as command
from tools.gpu_check import checks, prompts, start
from tools.gpu_check.cases import Launch, grpo_job, write_inputs
from tools.gpu_check.plan import Machine

CPU = torch.device("cpu")
HEADS = (6, 2, 16)


def test_a_step_with_shared_prompts_is_the_step_without(ranks, tmp_path) -> None:
    """And a figure that is off by a thousandth, or a run that has shared nothing, is named."""
    inputs = write_inputs(tmp_path / "inputs")
    jobs = [grpo_job(inputs, tmp_path, "grouped", "fp32", {}, shared=shared) for shared in (True, False)]
    launch = Launch(check="prompts", case="tp1", ranks=1, jobs=jobs)
    (row,) = command.run_launch(launch, tmp_path, PoolStart(ranks), {}, Machine(gpus_per_node=1, on_gpus=False))
    assert (row.status, row.case) == ("passed", "tp1 fp32"), row
    assert row.measured is not None
    assert 0 < row.measured < 1e-5
    results = start.results_of(tmp_path / launch.name / "launch.json")
    shared, unshared = (result["metrics"][-1] for result in results)
    assert (shared["prompts_saved"], shared["prompts_computed"]) == (24, 8)
    assert (unshared["prompts_saved"], unshared["prompts_computed"]) == (0, 32)
    assert min(abs(shared[name]) for name in ("policy_loss", "kl", "actor_grad_norm")) > 1e-2
    planted = json.loads(json.dumps(results))
    planted[0]["metrics"][-1]["kl"] *= 1.001
    planted[0]["metrics"][-1]["prompts_saved"] = 0
    off, nothing = checks.prompts(launch, planted)
    assert (off.status, off.figure) == ("FAILED", "kl")
    assert (nothing.status, nothing.note.split()[:2]) == ("FAILED", ["0", "prompts"])
    (alone,) = checks.prompts(launch, [planted[0]])
    assert alone.status == "FAILED"


@pytest.mark.parametrize("dtype", prompts.ROUNDING)
@pytest.mark.parametrize("name", ["ragged", "one token", "three levels"])
def test_attention_is_near_fp64(name, dtype) -> None:
    row = prompts.ROWS[name]
    for window in (None, 50):
        assert prompts._near_truth(CPU, row, HEADS, dtype, window) is None
    assert prompts._which_way(CPU) is None


@pytest.mark.parametrize("dtype", prompts.ROUNDING)
def test_a_wrong_merge_is_found(dtype, monkeypatch) -> None:
    """Log-sum-exps that are too large by a hundredth (in 16 bits a tenth), and one that is not merged."""
    right = tree_attention.merge_
    by = 0.01 if dtype == torch.float32 else 0.1

    def too_large(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
        right(out, lse, other, other_lse + by)

    def not_merged(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
        right(out, lse.clone(), other, other_lse)

    for wrong in (too_large, not_merged):
        monkeypatch.setattr(tree_attention, "merge_", wrong)
        said = prompts._near_truth(CPU, prompts.ROWS["ragged"], HEADS, dtype, None)
        assert said is not None
        assert "is off by" in said


def test_what_crosses_is_found(monkeypatch) -> None:
    row = prompts.ROWS["ragged"]
    assert prompts._nothing_crosses(CPU, row, HEADS, torch.bfloat16) is None
    plain = prompts.packed_attention
    monkeypatch.setattr(
        prompts, "packed_attention", lambda q, k, v, *more, **how: plain(q, k, v, *more, **how) + v.mean()
    )
    said = prompts._nothing_crosses(CPU, row, HEADS, torch.float32)
    assert f"{sum(row.lengths) - row.lengths[7]} tokens" in said


def test_sequences_of_a_row_by_hand() -> None:
    """Roots of 2 and 1 tokens; the first is continued by 1 token twice, the second of which by 2."""
    row = prompts.Row((2, 1, 1, 1, 2), (-1, -1, 0, 0, 3))
    lengths, token_U, first_U = row.unshared()
    assert lengths == (1, 3, 5)
    assert token_U.tolist() == [2, 0, 1, 3, 0, 1, 4, 5, 6]
    assert first_U.tolist() == [True, True, True, True, False, False, True, True, True]


def test_rows_of_the_check(capsys, tmp_path) -> None:
    """No time is left: all is skipped, and nothing passes."""
    out = tmp_path / "prompts.json"
    assert prompts.main(["--rehearse", "--limit", "1", "--out", str(out)]) == 0
    found = json.loads(out.read_text())["checks"]
    assert len(found) == 34
    rows = checks.kernels("attention", found, "prompts")
    assert {(row.check, row.status) for row in rows} == {("prompts", "skipped")}
    passed = [each | {"passed": True} for each in found]
    (row,) = checks.kernels("attention", passed, "prompts")
    assert (row.status, row.figure, row.check) == ("passed", "34 checks", "prompts")
    capsys.readouterr()
