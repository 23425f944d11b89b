"""Attention over packed rows: each sequence by itself, whatever stands before and after it in the row.

Not covered: varlen_attn's kernel and transformer-engine's own attention (both need a GPU; here is what they are called
with), several ranks (tests/distributed).
"""

import inspect
import math
from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from torch import Tensor
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention

from megarlhf.models.attention.layers import CausalAttention, open_packed_row, with_packed_rows
from megarlhf.models.attention.packed import packed_attention, varlen_attention
from megarlhf.models.attention.packed_rotary import PackedRotary
from megarlhf.models.attention.past import _varlen_attn, attention_path
from megarlhf.models.positions import PositionTable
from megarlhf.parallel.megatron_cpu import megatron_device
from megarlhf.parallel.packing.rows import packed_row
from tests.refuses import refuses

CPU = torch.device("cpu")
D = 8

ROWS: dict[str, tuple[int, ...]] = {
    "one token": (1,), "one sequence": (13,), "equal lengths": (6, 6, 6, 6),
    "in order of length": (40, 40, 17, 16, 15, 15, 3, 1, 1), "in no order": (3, 17, 1, 40, 15, 2, 17, 1, 6, 40, 5),
    "many": tuple(1 + 7 * n % 23 for n in range(60)), "long": (300, 2, 190, 129, 128, 1),
}  # fmt: skip


def inputs(num_tokens: int, heads: int, groups: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Query, key, value and the output's gradient."""
    generator = torch.Generator().manual_seed(num_tokens + 10 * groups)
    shapes = [(num_tokens, n, D) for n in (heads, groups, groups, heads)]
    return tuple(torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes)


def with_gradients(function, query, key, value, gradient) -> tuple[Tensor, ...]:
    """Output and the gradients of query, key and value."""
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    output = function(*leaves)
    return output.detach(), *torch.autograd.grad(output, leaves, gradient)


def by_hand(query, key, value, lengths, scale, window) -> Tensor:
    """Scores of all pairs of a sequence, those that do not count at -inf, softmax, sum."""
    parts = []
    for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True):
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
        behind = torch.arange(len(q))[:, None] - torch.arange(len(q))[None]
        seen = (behind >= 0) & (behind < (window or len(q)))
        scores = torch.einsum("ind,jnd->nij", q, k) * (1 / math.sqrt(D) if scale is None else scale)
        parts.append(torch.einsum("nij,jnd->ind", scores.masked_fill(~seen, -math.inf).softmax(-1), v))
    return torch.cat(parts)


def one_by_one(query, key, value, lengths, scale, window) -> Tensor:
    """torch's attention on each sequence."""
    parts = []
    for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True):
        seen = torch.ones(len(q), len(q), dtype=torch.bool).tril().triu(1 - (window or len(q)))
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("window", [None, 1, 3, 20, 100, 1000])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("lengths", ROWS.values(), ids=ROWS)
def test_each_sequence_by_itself_as_by_hand(lengths, groups, window):
    scale = 0.3 if groups == 2 else None
    given = inputs(sum(lengths), 4, groups)
    row = packed_row(lengths, CPU)
    actual = with_gradients(lambda *x: packed_attention(*x, row, scale=scale, window=window), *given)
    expected = with_gradients(lambda *x: by_hand(*x, lengths, scale, window), *given)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)
    assert actual[0].is_contiguous()


@pytest.mark.parametrize("window", [None, 8])
def test_fp32_errs_no_more_than_torch_does_on_each_sequence(window):
    """Largest error of output and gradients against fp64."""
    lengths = ROWS["long"] + ROWS["in no order"]
    given = inputs(sum(lengths), 4, 2)
    row = packed_row(lengths, CPU)
    truth = with_gradients(lambda *x: by_hand(*x, lengths, None, window), *given)
    rounded = tuple(x.float() for x in given)
    actual = with_gradients(lambda *x: packed_attention(*x, row, scale=None, window=window), *rounded)
    usual = with_gradients(lambda *x: one_by_one(*x, lengths, None, window), *rounded)
    for ours, torchs, exact in zip(actual, usual, truth, strict=True):
        error, bound = (ours - exact).abs().max(), (torchs - exact).abs().max()
        assert 0 < error <= 2 * bound


@pytest.mark.parametrize("window", [None, 5, 80])
def test_nothing_crosses_a_border(window):
    """Another sequence in the middle, of huge numbers and infinities: the others keep every bit of theirs."""
    lengths = (90, 90, 90, 7, 7, 90)
    row = packed_row(lengths, CPU)
    given = inputs(sum(lengths), 4, 2, torch.float32)
    before = with_gradients(lambda *x: packed_attention(*x, row, scale=None, window=window), *given)
    changed = [x.clone() for x in given]
    for x in changed:
        x[90:180] = 1e4 * torch.randn(x[90:180].shape)
    changed[2][100] = math.inf
    after = with_gradients(lambda *x: packed_attention(*x, row, scale=None, window=window), *changed)
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old[:90], new[:90])
        assert torch.equal(old[180:], new[180:])
        assert not torch.equal(old[90:180], new[90:180])


@pytest.mark.parametrize("window", [None, 6])
def test_the_order_of_the_sequences_does_not_matter(window):
    lengths, order = (40, 3, 17, 3, 70), (2, 4, 1, 0, 3)
    given = inputs(sum(lengths), 4, 2)
    plain = with_gradients(lambda *x: packed_attention(*x, packed_row(lengths, CPU), scale=None, window=window), *given)
    turned = [torch.cat([x.split(lengths)[n] for n in order]) for x in given]
    row = packed_row([lengths[n] for n in order], CPU)
    other = with_gradients(lambda *x: packed_attention(*x, row, scale=None, window=window), *turned)
    for out, permuted in zip(plain, other, strict=True):
        torch.testing.assert_close(torch.cat([out.split(lengths)[n] for n in order]), permuted, rtol=1e-12, atol=1e-13)


def test_a_row_of_other_length_is_refused():
    query, key, value, _ = inputs(12, 4, 2)
    with refuses("11 tokens", "12", error=AssertionError):
        packed_attention(query, key, value, packed_row((5, 6), CPU), scale=None, window=None)


@pytest.mark.parametrize(
    "device, dtype, head_dim, path",
    [
        ("cpu", torch.bfloat16, 64, "runs"),
        ("cuda", torch.bfloat16, 64, "varlen"),
        ("cuda", torch.float16, 256, "varlen"),
        ("cuda", torch.float32, 64, "runs"),
        ("cuda", torch.bfloat16, 264, "runs"),
        ("cuda", torch.bfloat16, 20, "runs"),
    ],
)
def test_which_way_a_row_goes(device, dtype, head_dim, path):
    assert attention_path(device, dtype, head_dim)[0] == path


def newest(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
    assert enable_gqa == (query.size(1) != key.size(1))
    assert window_size[1] == 0
    window = None if window_size[0] == -1 else window_size[0] + 1
    return as_called(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window)


def without_groups(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
    window = None if window_size[0] == -1 else window_size[0] + 1
    return as_called(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window)


def without_windows(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):
    raise AssertionError("must not be called")


def as_called(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window):
    """What varlen_attn gives by its documentation."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    lengths = cu_seq_q.diff().tolist()
    assert cu_seq_q[0] == 0
    assert cu_seq_k.diff().tolist() == lengths
    assert max_q == max_k == max(lengths)
    return by_hand(query, key, value, lengths, scale, window)


@pytest.fixture
def installed(monkeypatch):
    """Puts a function in varlen_attn's place."""
    _varlen_attn.cache_clear()
    yield lambda attend: monkeypatch.setattr(varlen, "varlen_attn", attend)
    _varlen_attn.cache_clear()


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_varlen_attn_is_called_as_it_wants_it(installed, scale, window):
    """A stand-in with its arguments, which does what its documentation says."""
    lengths = (4, 9, 1)
    query, key, value, _ = inputs(sum(lengths), 4, 2)
    installed(newest)
    output = varlen_attention(query, key, value, packed_row(lengths, CPU), scale=scale, window=window)
    torch.testing.assert_close(output, by_hand(query, key, value, lengths, scale, window), rtol=1e-12, atol=1e-12)


def test_a_varlen_attn_that_does_not_ask_for_query_groups_is_not_told_of_them(installed):
    """torch 2.11 has such a one, whose kernel takes groups: `make test-gpu` on one H200."""
    query, key, value, _ = inputs(3, 4, 2)
    installed(without_groups)
    output = varlen_attention(query, key, value, packed_row([3], CPU), scale=None, window=None)
    torch.testing.assert_close(output, by_hand(query, key, value, (3,), None, None), rtol=1e-12, atol=1e-12)


def test_a_varlen_attn_without_windows_is_refused(installed):
    query, key, value, _ = inputs(3, 4, 2)
    installed(without_windows)
    with refuses("varlen_attn", "scale", "window_size", "torch 2.13", "transformer-engine"):
        varlen_attention(query, key, value, packed_row([3], CPU), scale=None, window=None)


def test_the_installed_varlen_attn_has_the_arguments_of_the_newest_stand_in():
    installed = inspect.signature(varlen.varlen_attn).parameters
    for name, argument in inspect.signature(newest).parameters.items():
        assert installed[name].kind == argument.kind
        assert installed[name].default == argument.default


class ThdAttention:
    """Stands for TransformerEngine's attention: packed rows have no batch axis, and say `thd`."""

    def __init__(self, config, layer_number, softmax_scale=None):
        self.given = None

    def forward(self, query, key, value, attention_mask, attn_mask_type, attention_bias=None, packed_seq_params=None):
        assert (attention_mask, attn_mask_type, attention_bias) == (None, "causal", None)
        if packed_seq_params is None:
            return "padded"
        self.given = packed_seq_params
        lengths = packed_seq_params.cu_seqlens_kv.diff().tolist()
        assert query.dtype == torch.bfloat16, "there is no kernel for wider numbers"
        return by_hand(query, key, value, lengths, None, None).flatten(1)


def local_attention(window_size):
    config = SimpleNamespace(context_parallel_size=1, window_size=window_size)
    return CausalAttention(config, 1, None, "self")


def te_attention(window_size):
    config = SimpleNamespace(context_parallel_size=1, window_size=window_size)
    return with_packed_rows(ThdAttention)(config, 1, softmax_scale=None)


@pytest.mark.parametrize("make", [te_attention, local_attention])
@pytest.mark.parametrize("window_size, window", [(None, None), ((3, 0), 4)])
def test_a_layers_attention_takes_packed_rows_as_a_batch_of_one(make, window_size, window):
    """[T, 1, N, D] -> [T, 1, N x D]; Megatron's window (3, 0) is ours of 4. TransformerEngine has no kernel for wide
    numbers: they go our way."""
    lengths = (4, 9, 9, 1)
    query, key, value, _ = inputs(sum(lengths), 4, 2)
    module, row = make(window_size), packed_row(lengths, CPU)
    batch = [x[:, None] for x in (query, key, value)]
    output = module.forward(*batch, None, attn_mask_type="causal", attention_bias=None, packed_seq_params=row)
    expected = by_hand(query, key, value, lengths, None, window).flatten(1)[:, None]
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    twice = [x.expand(-1, 2, -1, -1) for x in batch]
    with refuses("one packed row", "2 rows", error=AssertionError):
        module.forward(*twice, None, attn_mask_type="causal", attention_bias=None, packed_seq_params=row)
    if isinstance(module, ThdAttention) and window is None:
        assert module.given is None
        short = [x.bfloat16() for x in batch]
        output = module.forward(*short, None, attn_mask_type="causal", attention_bias=None, packed_seq_params=row)
        torch.testing.assert_close(output.double(), expected, rtol=0, atol=0.05)
        assert module.given.qkv_format == "thd"
        assert module.given.cu_seqlens_q.tolist() == [0, 4, 13, 22, 23]
        assert (module.given.max_seqlen_q, module.given.max_seqlen_kv) == (9, 9)
        assert module.forward(*batch, None, attn_mask_type="causal") == "padded"


def test_a_packed_row_is_turned_as_padded_rows_are():
    """Angles have the bits of the padded ones, and a row of the same length after it gets its own. Queries come out as
    Megatron-Core turns them, but for the last bit."""
    rotary = PackedRotary(
        dtype=torch.float32, kv_channels=32, rotary_percent=1.0, rotary_base=10000, use_cpu_initialization=True
    )
    rotary.inv_freq = rotary.inv_freq * 0.7  # as a scaling changes it after construction
    config = SimpleNamespace(sequence_parallel=True, tensor_model_parallel_size=2, context_parallel_size=1)
    with megatron_device(CPU):
        padded_S11D = rotary(1000)
        for lengths in ((1000, 3, 3, 1, 700), (3, 1000, 700, 3, 1)):
            row = packed_row(lengths, CPU)
            assert rotary(rotary.get_rotary_seq_len(None, None, torch.empty(0), None, row)) is None
            angles_T11D = torch.cat([padded_S11D[:length] for length in lengths])
            half_T1D = angles_T11D[:, 0, :, :16]
            assert torch.equal(row.rotary_cos_sin[0], half_T1D.cos())
            assert torch.equal(row.rotary_cos_sin[1], half_T1D.sin())
            query_T1ND = torch.randn(len(angles_T11D), 1, 3, 32)
            expected_T1ND = _apply_rotary_pos_emb_bshd(query_T1ND, angles_T11D)
            _, rotated_TND, _, value_TND = open_packed_row(row, query_T1ND, query_T1ND, query_T1ND)
            torch.testing.assert_close(rotated_TND[:, None], expected_T1ND, rtol=0, atol=1e-6)
            assert torch.equal(value_TND, query_T1ND[:, 0])
        assert rotary.get_rotary_seq_len(None, None, torch.empty(6, 2, 4), config, None) == 12


def test_a_packed_row_may_be_longer_than_the_position_table():
    """Its positions may not: five of them, behind two rows of offset."""
    arch = SimpleNamespace(position_offset=2, max_positions=5)
    sizes = {"tensor_model_parallel_size": 1, "context_parallel_size": 1, "hidden_size": 1}
    config = SimpleNamespace(**sizes, params_dtype=torch.float32, deterministic_mode=False)
    table = PositionTable(config, arch)
    table.weight.data = torch.arange(7.0)[:, None]
    positions_1T = packed_row((5, 1, 5), CPU).positions_T[None]
    assert table(positions_1T)[0, :, 0].tolist() == [2, 3, 4, 5, 6, 2, 2, 3, 4, 5, 6]
    with refuses("6 positions", "5", error=AssertionError):
        table(packed_row((2, 6), CPU).positions_T[None])
