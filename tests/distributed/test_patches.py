"""Each substitution in other projects' code, and each part of ours that stands for a broken one of theirs, is still
needed. A failure here is good news: remove it."""

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megarlhf.layout import MeshLayout
from megarlhf.parallel.mesh import GroupCache, build_mesh
from megarlhf.runtime import Runtime
from tests.distributed.tiny import write_family
from tests.refuses import missing_names


def test_megatron_core_still_names_cuda(ranks, models) -> None:
    """Without the scope, Megatron's schedule asks for a CUDA device and fails; with it, it runs."""
    message = ranks.run(1, "forward_without_the_cpu_scope", str(models["plain"]))[0]
    assert "CUDA" in message or "cuda" in message


def test_the_scope_changes_nothing_outside() -> None:
    """Also after an error inside; and it nests."""
    from megarlhf.parallel.megatron_cpu import megatron_device

    before = {name: getattr(torch.cuda, name) for name in ("current_device", "synchronize", "Stream")}
    with pytest.raises(KeyError), megatron_device(torch.device("cpu")):  # noqa: PT012 -- the scope is what is tested
        assert torch.cuda.current_device() == torch.device("cpu")
        with megatron_device(torch.device("cpu")):
            assert torch.zeros(1, device="cuda").device.type == "cpu"
        assert torch.zeros(1, device="cuda").device.type == "cpu"
        raise KeyError
    assert before == {name: getattr(torch.cuda, name) for name in before}
    if not torch.cuda.is_available():
        with pytest.raises((AssertionError, RuntimeError)):
            torch.zeros(1, device="cuda")


def norms_of_gradients(runtime: Runtime, gradients: list[torch.Tensor]) -> tuple[float, float]:
    """As the optimizer asks for it: in the scope, and outside it of what torch has there."""
    from megatron.core.optimizer import clip_grads

    from megarlhf.parallel.megatron_cpu import megatron_device

    with megatron_device(runtime.device):
        inside = clip_grads.get_grad_norm_fp32(gradients, grad_stats_parallel_group=dist.group.WORLD)
    return inside, float(torch.norm(torch.stack([torch.norm(gradient) for gradient in gradients])))


def test_the_norm_of_gradients_is_that_in_fp64(ranks) -> None:
    """Of an embedding as SmolLM2's at that: torch's sum in fp32 loses what is added to a large number."""
    torch.manual_seed(0)
    # Not a whole number of rows; one that has less than a row; one that is empty, as shards of an optimizer can be.
    gradients = [torch.randn(size) * torch.rand(size) ** 8 for size in ((49152, 577), (5, 7), (0,))]
    true = float(sum(gradient.double().square().sum() for gradient in gradients)) ** 0.5
    ((inside, of_torch),) = ranks.run(1, norms_of_gradients, gradients)
    assert inside == pytest.approx(true, rel=2e-7)
    assert of_torch != pytest.approx(true, rel=1e-4), "torch adds up better than it did: the patch can go"


def threads_of_groups(runtime: Runtime) -> tuple[int, int]:
    """Of gloo's default group, and of one that a mesh has."""
    mesh = build_mesh(MeshLayout(tp=2), runtime, GroupCache(runtime))
    groups = (dist.group.WORLD, mesh.groups.tp)
    world, own = (group._get_backend(torch.device("cpu")).options._threads for group in groups)
    return world, own


def test_gloo_still_has_two_threads_for_a_group(ranks) -> None:
    """`parallel/process_groups.py`: with two and two messages under way a process dies now and then, which no test of a
    few seconds can be sure to see; docs/log.md has how to."""
    assert ranks.run(2, threads_of_groups) == [(2, 1)] * 2


def test_megatron_core_still_leaves_sizes_of_messages_on_the_cpu_as_tensors() -> None:
    """`parallel/megatron_cpu.py`: gloo's all_to_all takes lists of numbers."""
    from megatron.core.transformer.moe.moe_utils import maybe_move_tensor_to_cpu

    assert torch.is_tensor(maybe_move_tensor_to_cpu(torch.tensor([1, 2]), as_numpy=True))


def test_megatron_core_s_router_still_needs_transformer_engine() -> None:
    """`models/experts.py::Router`: without it, upstream's product of hidden states and router is a name never set."""
    from megatron.core.transformer.moe import moe_utils

    if moe_utils.HAVE_TE:
        pytest.skip("transformer-engine is installed")
    with pytest.raises(NameError, match="te_general_gemm"):
        moe_utils.router_gating_linear(torch.ones(2, 3), torch.ones(4, 3), None, torch.float32)


def test_megatron_core_still_cuts_kv_groups_over_its_global_group() -> None:
    """`models/attention/layers.py::GroupedSelfAttention`: the gather has no group, the rank is that of
    `parallel_state`."""
    from megatron.core.transformer.attention import SelfAttention

    source = inspect.getsource(SelfAttention.get_query_key_value_tensors)
    assert "all_gather_last_dim_from_tensor_parallel_region(mixed_qkv)" in source
    assert "get_tensor_model_parallel_rank()" in source


def test_megatron_core_s_stage_layout_still_asks_the_global_rank() -> None:
    """`models/settings.py::StageLayout`."""
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    rows = [["embedding", "decoder"], ["decoder", "decoder", "loss"]]
    with pytest.raises(AssertionError, match="not initialized"):
        PipelineParallelLayerLayout(rows, 2).get_layer_offset()


def test_megatron_core_s_position_table_is_still_fp32_in_a_bf16_model() -> None:
    """`models/positions.py::PositionTable`."""
    from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding

    source = inspect.getsource(LanguageModelEmbedding.__init__)
    table = source[source.index("torch.nn.Embedding(") :]
    assert "dtype" not in table[: table.index("# Initialize")]


def test_vllm_still_takes_the_weight_out_of_cpu_layers() -> None:
    """Its own dispatch packs the weight and leaves an empty parameter, so nothing can be written in place."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    layer: Any = torch.nn.Linear(64, 64, bias=False)
    layer.weight.requires_grad_(False)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    assert layer.weight.numel() == 0


def test_vllm_still_names_shared_memory_alike_in_every_externally_launched_run() -> None:
    """The name comes from the part of `env://` after its last colon, which says nothing of the run."""
    from vllm.v1.worker import cpu_worker

    assert 'init_method.split(":")[-1]' in inspect.getsource(cpu_worker)


def test_vllm_still_packs_experts_at_unchanged_shape(fresh_ranks, tmp_path) -> None:
    """Without `_keep_experts` the engine finds, before the first write, that every expert tensor's memory changed, and
    refuses it by name. Packed, their shape says nothing: the widths here are multiples of 32."""
    model = write_family(tmp_path / "model", "mixtral", hidden_size=128)
    message = fresh_ranks.run(1, "vllm_packed_experts", str(model))[0]
    assert not missing_names(message, "RuntimeError", "copy plan", "moe_backend 'triton'"), message
    named = [line.removeprefix("  rank 0: ") for line in message.splitlines() if line.startswith("  rank")]
    experts = "model.layers.{}.block_sparse_moe.experts.routed_experts."
    w13 = [f"{experts.format(layer)}w13_weight [4, 192, 128]" for layer in range(4)]
    w2 = [f"{experts.format(layer)}w2_weight [4, 128, 96]" for layer in range(4)]
    assert sorted(line.partition("]")[0] + "]" for line in named) == sorted(w13 + w2)
    assert all("changed in memory" in line for line in named)


def test_vllm_still_destroys_the_default_process_group() -> None:
    """`keep_default_group`: an engine that is closed would take the trainer's group with it."""
    from vllm.distributed import parallel_state

    source = inspect.getsource(parallel_state.destroy_distributed_environment)
    assert "torch.distributed.destroy_process_group()" in source
    assert "destroy_distributed_environment()" in inspect.getsource(parallel_state.cleanup_dist_env_and_memory)


def test_vllm_still_multiplies_by_a_head_of_another_dtype_on_its_own() -> None:
    """`_apply_head`: this product goes past the linear layers, whose product is ours."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    assert "return F.linear(" in inspect.getsource(LogitsProcessor._apply_head)


def test_a_product_on_a_cpu_still_depends_on_the_number_of_rows_and_ours_does_not(monkeypatch) -> None:
    """`vllm_patches.linear`, for as many rows as requests may be in a batch; the product as it is where it differs."""
    from megarlhf.rollout.vllm import patches as vllm_patches
    from megarlhf.rollout.vllm.patches import linear

    differs, kept, have = [], torch.get_num_threads(), vllm_patches.HAVE_ONEDNN
    try:
        for threads, one_dnn in ((1, True), (2, True), (1, False), (2, False)):
            torch.set_num_threads(threads)
            monkeypatch.setattr(vllm_patches, "HAVE_ONEDNN", one_dnn and have)
            for inner, outer in ((64, 16), (64, 192), (512, 256)):
                input_TH, weight_VH = torch.randn(64, inner), torch.randn(outer, inner)
                whole_TV = linear(input_TH, weight_VH)
                torch.testing.assert_close(whole_TV, input_TH @ weight_VH.T, rtol=1e-5, atol=1e-4)
                for rows in range(1, 64):
                    for start in (0, 64 - rows):
                        part, expected = input_TH[start : start + rows], whole_TV[start : start + rows]
                        assert torch.equal(linear(part, weight_VH), expected), (threads, inner, outer, rows)
                        differs.append(not torch.equal(torch.nn.functional.linear(part, weight_VH), expected))
    finally:
        torch.set_num_threads(kept)
    if not any(differs):
        pytest.skip("on this CPU the products of few rows have the bits of those of many")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_our_product_takes_a_bias_and_no_rows_at_all(dtype) -> None:
    from megarlhf.rollout.vllm.patches import linear

    weight_VH, bias_V = torch.randn(6, 4, dtype=dtype), torch.randn(6, dtype=dtype)
    for rows in (0, 1, 2, 3):
        input_TH = torch.randn(rows, 4, dtype=dtype)
        expected = torch.nn.functional.linear(input_TH, weight_VH, bias_V)
        torch.testing.assert_close(linear(input_TH, weight_VH, bias_V), expected)
