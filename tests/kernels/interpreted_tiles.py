"""What only Triton's kernels do. test_triton.py runs this with their interpreter.

Not covered here: that a GPU's code compiles and rounds as the interpreter does (it truncates to bf16), and several
streams or devices.
"""

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

from megarlhf.kernels import dispatch, linear_token_logprobs, tiles_triton, token_logprobs
from megarlhf.kernels.statistics import VocabRange, empty_table
from megarlhf.kernels.tiles import LogprobOptions, OutputGradients
from megarlhf.kernels.tiles_torch import TorchTiles
from megarlhf.kernels.tiles_triton import Block, TritonTiles
from tests.kernels.cases import IGNORE, Recorded, far_apart, made, run_backend

HOW = LogprobOptions(temperature=0.7, ignore_index=IGNORE, vocab=600, entropy=True)


@pytest.fixture
def asserting(monkeypatch):
    """The interpreter leaves out device assertions unless told otherwise; with them it also checks integer overflow."""
    options = dataclasses.replace(interpreter.interpreter_builder.options, debug=True)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", options)
    monkeypatch.setattr(dispatch, "require_labels", lambda *_: None)


@pytest.mark.parametrize("label", [600, 640, 2**40, -1, -99])
def test_a_label_outside_the_vocabulary_trips_the_kernels_assertion(asserting, label):
    logits_TV = torch.zeros(3, 640)
    token_logprobs(logits_TV, torch.tensor([599, IGNORE, 0]), true_vocab=600, backend="triton")
    labels_T = torch.tensor([3, IGNORE, label])
    with pytest.raises(InterpreterError, match="label outside the vocabulary") as caught:
        token_logprobs(logits_TV, labels_T, true_vocab=600, backend="triton")
    assert isinstance(caught.value.__cause__, AssertionError)
    with pytest.raises(InterpreterError, match="label outside the vocabulary"):
        linear_token_logprobs(torch.ones(3, 4), torch.ones(640, 4), labels_T, true_vocab=600, backend="triton")


@pytest.fixture
def launched(monkeypatch):
    """Names of kernels, as they are launched."""
    names = []

    def noting(kernel):
        run = kernel.run

        def noted(*args, **kwargs):
            names.append(kernel.fn.__name__)
            with _disable_current_modes():  # the interpreter uses torch itself
                return run(*args, **kwargs)

        return noted

    for name in ("_statistics_kernel", "_merge_kernel", "_gradient_kernel"):
        kernel = getattr(tiles_triton, name)
        monkeypatch.setattr(kernel, "run", noting(kernel), raising=False)
    return names


class Operators(Recorded):
    """Scope that notes every torch operator but those that only make memory or views of it."""

    FREE = ("empty", "empty_like", "new_empty", "detach", "unsqueeze", "select", "slice", "alias", "view", "_to_copy")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function).split(".")[1]
        if name not in self.FREE:
            self.events.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("return_entropy", [True, False])
def test_a_forward_is_two_launches_and_a_backward_one(launched, monkeypatch, return_entropy):
    """And nothing of torch's between them, but a CPU's look at the labels."""
    monkeypatch.setattr(dispatch, "require_labels", lambda *_: None)
    logits_TV, labels_T, _ = made(5, 640, true_vocab=600)
    labels_T[0] = IGNORE
    leaf_TV = logits_TV.requires_grad_()
    with Operators() as forward:
        outputs = token_logprobs(leaf_TV, labels_T, true_vocab=600, return_entropy=return_entropy, backend="triton")
    assert launched == ["_statistics_kernel", "_merge_kernel"]
    assert forward.events == ["ne"]
    launched.clear()
    by_T = torch.ones(5)
    with Operators() as backward:
        gradient = torch.autograd.grad(outputs[0], leaf_TV, by_T)[0]
    assert launched == ["_gradient_kernel"]
    assert backward.events == []
    assert torch.count_nonzero(gradient) > 0


def tables(tiles, logits_TV, labels_T, cuts):
    """One table from these consecutive parts of the columns, of which the first HOW.vocab are not padding."""
    table_T4 = empty_table(logits_TV)
    whole = VocabRange(0, HOW.vocab)
    for number, (start, stop) in enumerate(cuts):
        tiles.update(table_T4, logits_TV[:, start:stop], labels_T, whole.cut(start, stop), fresh=number == 0)
    return table_T4


@pytest.mark.parametrize(
    "cuts", [[(0, 640)], [(0, 0), (0, 640)], [(0, 320), (320, 640)], [(0, 1), (1, 610), (610, 640)]]
)
def test_statistics_of_columns_in_parts(cuts):
    """Also parts without a column, of padding only, and where a row is all -inf before the last part."""
    logits_TV, labels_T, _ = made(9, 640, true_vocab=600)
    logits_TV[3, :599] = -torch.inf
    labels_T[3] = 599
    expected_T4 = tables(TorchTiles(HOW), logits_TV.double(), labels_T, [(0, 640)])
    actual_T4 = tables(TritonTiles(HOW), logits_TV, labels_T, cuts)
    kept_T = labels_T != IGNORE
    torch.testing.assert_close(actual_T4[kept_T].double(), expected_T4[kept_T], rtol=1e-5, atol=1e-5)
    # An ignored row is not read: nothing in it but what a fresh table holds.
    assert (~kept_T).any()
    assert actual_T4[~kept_T].unique(dim=0).tolist() == [[torch.finfo(torch.float32).min, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_merged_ranks(tp):
    """At tp 4 the last rank holds padding only; one row's every label and finite logit is on the first."""
    logits_TV, labels_T, _ = made(9, 640, true_vocab=480)
    how = dataclasses.replace(HOW, vocab=480)
    logits_TV[3, 160:] = -torch.inf
    labels_T[3] = 100
    shards = [logits_TV[:, rank * 640 // tp : (rank + 1) * 640 // tp] for rank in range(tp)]
    merged = []
    for tiles, dtype in ((TritonTiles(how), torch.float32), (TorchTiles(how), torch.float64)):
        table_by_rank = []
        for rank, shard_TV in enumerate(shards):
            table_by_rank.append(empty_table(shard_TV.to(dtype)))
            columns = VocabRange(0, 480).cut(rank * 640 // tp, (rank + 1) * 640 // tp)
            tiles.update(table_by_rank[-1], shard_TV.to(dtype), labels_T, columns, fresh=True)
        merged.append(tiles.merge(torch.stack(table_by_rank), labels_T))
    kept_T = labels_T != IGNORE
    for ours_T, want_T in zip(*merged, strict=True):
        assert ours_T.isfinite().all()
        assert ours_T.untyped_storage().nbytes() == 9 * 4, "of its own"
        torch.testing.assert_close(ours_T[kept_T].double(), want_T[kept_T], rtol=1e-5, atol=1e-5)
    for name in ("logprobs_T", "entropy_T"):
        assert torch.count_nonzero(getattr(merged[0], name)[~kept_T]) == 0
        assert torch.count_nonzero(getattr(merged[0], name)[kept_T]) == kept_T.sum()


def gradients(tiles, out_TV, logits_TV, labels_T, by_logprob_T, by_entropy_T):
    columns = VocabRange(0, HOW.vocab)
    table_T4 = tables(tiles, logits_TV, labels_T, [(0, logits_TV.size(1))])
    outputs = OutputGradients(tiles.merge(table_T4[None], labels_T), labels_T, by_logprob_T, by_entropy_T)
    tiles.gradient(out_TV, logits_TV, columns, outputs)
    return out_TV


@pytest.mark.parametrize("given", ["both", "logprob", "entropy", "neither"])
@pytest.mark.parametrize("where", ["in place", "bf16", "transposed"])
def test_gradients_wherever_they_go(given, where):
    """Over the logits, into a narrower dtype, or into columns that are not side by side; padding becomes 0."""
    logits_TV, labels_T, weights_2T = made(9, 640, true_vocab=600)
    by_logprob_T = weights_2T[0] if given in ("both", "logprob") else None
    by_entropy_T = weights_2T[1] if given in ("both", "entropy") else None
    ups = [None if up_T is None else up_T.double() for up_T in (by_logprob_T, by_entropy_T)]
    want_TV = gradients(TorchTiles(HOW), torch.empty(9, 640).double(), logits_TV.double(), labels_T, *ups)
    out_TV = {
        "in place": logits_TV,
        "bf16": torch.full((9, 640), torch.nan, dtype=torch.bfloat16),
        "transposed": torch.full((640, 9), torch.nan).t(),
    }[where]
    gradient_TV = gradients(TritonTiles(HOW), out_TV, logits_TV, labels_T, by_logprob_T, by_entropy_T)
    assert gradient_TV.data_ptr() == out_TV.data_ptr()
    rtol = 2**-7 if where == "bf16" else 1e-5  # the interpreter truncates
    torch.testing.assert_close(gradient_TV.double(), want_TV, rtol=rtol, atol=1e-6)
    assert torch.count_nonzero(gradient_TV[:, 600:]) == 0
    assert torch.count_nonzero(gradient_TV) == (0 if given == "neither" else (labels_T != IGNORE).sum() * 600)


def test_a_shards_gradient_is_that_part_of_the_wholes():
    """The same bits: only the label's column has to be found again."""
    logits_TV, labels_T, weights_2T = made(9, 640, true_vocab=600)
    whole_TV = gradients(TritonTiles(HOW), torch.empty(9, 640), logits_TV, labels_T, *weights_2T)
    tiles = TritonTiles(HOW)
    merged = tiles.merge(tables(tiles, logits_TV, labels_T, [(0, 640)])[None], labels_T)
    outputs = OutputGradients(merged, labels_T, *weights_2T)
    for start, stop in ((0, 200), (200, 610), (610, 640)):
        part_TV, columns = torch.full((9, stop - start), torch.nan), VocabRange(0, 600).cut(start, stop)
        tiles.gradient(part_TV, logits_TV[:, start:stop], columns, outputs)
        assert torch.equal(part_TV, whole_TV[:, start:stop])
    kept_T = labels_T[labels_T != IGNORE]
    assert (kept_T < 200).any()
    assert (kept_T >= 200).any()


def test_rows_that_nothing_hangs_on_are_not_read():
    """Their logits are NaN; their gradient is 0."""
    logits_TV, _, weights_2T = made(9, 640)
    labels_T = torch.arange(9)
    by_T = weights_2T[0] * torch.tensor([1, 0, 1, 1, 0, 1, 1, 1, 0])
    logits_TV[by_T == 0] = torch.nan
    gradient_TV = gradients(
        TritonTiles(HOW), torch.full((9, 640), torch.nan), logits_TV, labels_T, by_T, torch.zeros(9)
    )
    assert torch.count_nonzero(gradient_TV[by_T == 0]) == 0
    assert torch.count_nonzero(gradient_TV[by_T != 0]) == 6 * 600


def test_a_gradient_past_two_to_the_31(asserting, tmp_path, monkeypatch):
    """Written over logits as far apart as those of 40000 x 128256. An overflow of 32 bits would be an assertion."""
    small_TV, labels_T, weights_2T = made(17, 640, true_vocab=600)
    small_TV = small_TV.bfloat16()
    expected_TV = gradients(TritonTiles(HOW), small_TV.clone(), small_TV, labels_T, *weights_2T)
    far_TV = far_apart(small_TV, tmp_path / "logits", monkeypatch)
    gradients(TritonTiles(HOW), far_TV, far_TV, labels_T, *weights_2T)
    assert torch.equal(far_TV, expected_TV)
    assert torch.count_nonzero(far_TV[16]) == 600


@pytest.mark.parametrize("columns", [256, 1024])
def test_other_blocks_give_the_same_values(columns):
    logits_TV, labels_T, weights_2T = made(5, 640)
    block = Block(columns=columns, warps=2)
    usual_TV = gradients(TritonTiles(HOW), torch.empty(5, 640), logits_TV, labels_T, *weights_2T)
    other = TritonTiles(HOW, forward=block, backward=block)
    other_TV = gradients(other, torch.empty(5, 640), logits_TV, labels_T, *weights_2T)
    torch.testing.assert_close(other_TV, usual_TV, rtol=1e-5, atol=1e-6)
    assert torch.count_nonzero(other_TV) > 0


def test_blocks_fit_short_rows():
    """A block has at most twice a row's columns, down to 256, and a warp at least 256 of them."""
    assert Block(4096, 8).fitted(128256) == Block(4096, 8)
    assert Block(4096, 8).fitted(1000) == Block(1024, 4)
    assert Block(4096, 8).fitted(3) == Block(4096, 8).fitted(0) == Block(256, 1)


def test_a_wide_row_is_walked_in_several_blocks():
    """5000 columns: a full block of 4096 and a part of one."""
    logits_TV, labels_T, weights_2T = made(5, 5000)
    logits_TV[:, 4999] = 20.0
    results = run_backend("triton", logits_TV, labels_T, weights_2T)
    expected = run_backend("reference", logits_TV.double(), labels_T, weights_2T)
    for name, want in expected.items():
        torch.testing.assert_close(results[name].double(), want, rtol=1e-5, atol=1e-6)
