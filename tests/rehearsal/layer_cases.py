"""Rehearses stacks of three layers on a GPU that is not there, in a process of its own; prints what the ranks saw.

python -m tests.rehearsal.layer_cases NAME ...
"""

import json
import logging
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarlhf.config import SFTConfig
from megarlhf.models.role import build_role
from megarlhf.parallel.mesh import GroupCache
from megarlhf.parallel.micro_batch import MicroBatch, MicroBatchLayout
from megarlhf.rehearsal.fake_device import torch_patches
from megarlhf.rehearsal.fakes.lengths import Constant
from megarlhf.rehearsal.fakes.weights import UninitializedWeights
from megarlhf.rehearsal.program import Job, Rank
from megarlhf.runtime import Runtime

LENGTHS = (2048, 1024, 1024)
TOKENS = sum(LENGTHS)
NUM_LAYERS = 3
_COMMON: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "vocab_size": 1024, "max_position_embeddings": 8192}
_LLAMA: dict[str, Any] = {
    **_COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": NUM_LAYERS,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama-3-70b": {
        **_LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8,
    },
    "gpt2-xl": {
        **_COMMON, "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": NUM_LAYERS, "n_embd": 1600,
        "n_head": 25, "n_positions": 8192, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
    },
    "opt": {
        **_COMMON, "architectures": ["OPTForCausalLM"], "model_type": "opt", "num_hidden_layers": NUM_LAYERS,
        "hidden_size": 2048, "word_embed_proj_dim": 2048, "ffn_dim": 8192, "num_attention_heads": 32,
        "activation_function": "relu", "do_layer_norm_before": True,
    },
    "qwen3-8b": {
        **_LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096,
        "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    },
    "qwen3-moe": {
        **_LLAMA, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True,
        "num_experts": 16, "num_experts_per_tok": 8,
    },
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    model: str
    tp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    layers: str = "te"
    padded: bool = False
    trains: bool = True
    tree: bool = False
    """The last two continue the first."""


def _both(model: str, tp: int, sequence_parallel: bool = False) -> dict[str, Case]:
    name = f"{model} tp{tp}{' sp' if sequence_parallel else ''}"
    return {
        f"{name} {layers}": Case(model=model, tp=tp, sequence_parallel=sequence_parallel, layers=layers)
        for layers in ("te", "local")
    }


CASES: dict[str, Case] = {
    **_both("llama-3-70b", 8, True),
    **_both("llama-3-70b", 8),
    **_both("llama-3-70b", 2, True),
    **_both("llama-3-70b", 1),
    **_both("gpt2-xl", 1),
    **_both("opt", 2, True),
    **_both("qwen3-moe", 2, True),
    **_both("qwen3-8b", 2, True),
    "llama-3-70b padded te": Case(model="llama-3-70b", tp=8, padded=True),
    "llama-3-70b tp8 sp cp2 te": Case(model="llama-3-70b", tp=8, cp=2, sequence_parallel=True),
    "llama-3-70b padded cp2 te": Case(model="llama-3-70b", tp=8, cp=2, padded=True),
    "llama-3-70b tp8 sp cp2 gathered": Case(model="llama-3-70b", tp=8, cp=2, sequence_parallel=True, layers="local"),
    "llama-3-70b tree te": Case(model="llama-3-70b", tp=8, sequence_parallel=True, tree=True),
    "llama-3-70b tree local": Case(model="llama-3-70b", tp=8, sequence_parallel=True, tree=True, layers="local"),
    "gpt2-xl tree te": Case(model="gpt2-xl", tree=True),
    "llama-3-70b frozen te": Case(model="llama-3-70b", tp=8, sequence_parallel=True, trains=False),
}


class _Sum:
    """A loss that keeps nothing of its own."""

    names: tuple[str, ...] = ()

    def __call__(self, output: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor, None]:
        value = output.sum()
        return value, torch.zeros(0, device=value.device), None


class _Free:
    """Work takes no time."""

    def operation_seconds(self, *args: Any, **named: Any) -> float:
        return 0.0


def rehearse(case: Case) -> dict[str, Any]:
    """Build, forward, backward, optimizer: of rank 0."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "config.json").write_text(json.dumps(MODELS[case.model]))
        rank, batch = _rank(case, folder), _batch(case)
        world = case.tp * case.cp
        torch_patches.join(0, world, "gpu")
        stack.callback(dist.destroy_process_group)
        runtime = Runtime(
            rank=0, local_rank=0, world_size=world, local_world_size=world, ranks_per_block=world, device=rank.device,
            backend=torch_patches.BACKENDS["gpu"],
        )  # fmt: skip
        stack.enter_context(torch_patches.patched(rank._hooks()))
        stack.enter_context(rank.mode)
        batch = MicroBatch(batch.tokens_BS.to(rank.device), {}, batch.layout)
        return _seen(case, rank, GroupCache(runtime), batch)


def _rank(case: Case, folder: Path) -> Rank:
    parallel = {"tp": case.tp, "cp": case.cp, "sequence_parallel": case.sequence_parallel}
    tree = {
        "run": {"dir": str(folder / "run")},
        "actor": {"model": {"path": str(folder), "dtype": "bf16"}, "parallel": parallel},
        "data": {"train": "none.jsonl"},
        "train": {"num_steps": 1, "mini_batch_samples": 8, "max_tokens_per_micro_batch": TOKENS},
    }
    job = Job(
        command="sft", cfg=SFTConfig.model_validate(tree), rank=0, world_size=case.tp * case.cp, ranks_per_node=8,
        kind="gpu", layers=case.layers, num_steps=1, response_lengths=Constant(8),
    )  # fmt: skip
    return Rank(job, _Free())


def _batch(case: Case) -> MicroBatch:
    numbers = tuple(range(len(LENGTHS)))
    if case.padded:
        return MicroBatch(torch.zeros(2, TOKENS // 2, dtype=torch.int64), {})
    starts = tuple(sum(LENGTHS[:n]) for n in numbers)
    layout = MicroBatchLayout(sequences=numbers, lengths=LENGTHS, starts=starts, rows=1, columns=TOKENS, packed=True)
    if case.tree:
        layout = replace(layout, segments=LENGTHS, parents=(-1, 0, 0), last_segments=numbers)
    return MicroBatch(torch.zeros(1, TOKENS, dtype=torch.int64), {}, layout)


def _seen(case: Case, rank: Rank, cache: GroupCache, batch: MicroBatch) -> dict[str, Any]:
    section, ledger, live, experts = rank.job.cfg.actor, rank.ledger, [], []
    places: set[str] = set()
    rank._enter_phase(1, "build")
    steps = 1 if case.trains else None
    weights = UninitializedWeights(rank._prepare)
    role = build_role("actor", section, "lm", cache, seed=0, num_optimizer_steps=steps, weights=weights)
    for layer in role.shard.module.decoder.layers:
        layer.register_forward_hook(lambda *_: live.append(ledger.total))
        if role.shard.arch.num_experts:
            layer.mlp.experts.register_forward_pre_hook(lambda *_: experts.append(ledger.total))
            layer.mlp.experts.register_forward_hook(lambda *_: experts.append(ledger.total))
    rank._enter_phase(1, "train/actor")
    if case.trains:
        role.accumulate([batch], _Sum())
        places = {change.storage.origin.where.partition(":")[0] for change in ledger._stay.all_changes()}
        rank._enter_phase(1, "optimizer/actor")
        role.optimizer_step({}, lambda *_: "")
    else:
        role.forward([batch], lambda output, batch: output.sum())
    ledger.leave()
    parameters = {name: list(tensor.shape) for name, tensor in role.shard.parameters().items()}
    return {
        "live": live,
        "experts": experts,
        "places": sorted(places),
        "numbers_read": rank.assumptions.counts.total(),
        "parameters": parameters,
        "phases": [{**asdict(phase), "curve": []} for phase in ledger.phases],
        "wire": sorted([*line, count, rank.wire.nbytes[line]] for line, count in rank.wire.counts.items()),
        "flops": {work: flops for (_, phase, work), flops in rank.meter.flops.items() if phase == "train/actor"},
    }


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    print(json.dumps({name: rehearse(CASES[name]) for name in sys.argv[1:] or CASES}))
