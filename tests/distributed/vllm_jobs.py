"""What the rank processes do with vLLM's engine and weights."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megarlhf.architectures.architecture import Architecture
from megarlhf.architectures.placements import vllm_placements
from megarlhf.config import RoleConfig, RolloutConfig
from megarlhf.models.role import Role, build_role
from megarlhf.models.settings import DTYPES
from megarlhf.models.weights import load_weights
from megarlhf.parallel.mesh import GroupCache
from megarlhf.placement import Box, Placement, RankPlacements
from megarlhf.rollout.responses import Sampling
from megarlhf.rollout.vllm import patches as vllm_patches
from megarlhf.runtime import Runtime
from megarlhf.weights.plan.copy_plan import CopyPlan
from megarlhf.weights.transport import reshard

MAX_LENGTH, NEW_TOKENS, EOS = 64, 6, 2


class _Session:
    """An actor and an engine that it feeds."""

    def __init__(
        self, runtime: Runtime, model: str, tp: int, parallel: dict[str, Any], dtype: str = "fp32", **rollout: Any
    ) -> None:
        from megarlhf.rollout.vllm.engine import VllmEngine

        self.runtime = runtime
        offload = {"parameters": bool(rollout.get("vllm", {}).get("sleep_level"))}
        self.section = RoleConfig.model_validate(
            {"model": {"path": model, "dtype": dtype}, "parallel": parallel, "offload": offload}
        )
        self.actor: Role = build_role("actor", self.section, "lm", GroupCache(runtime), seed=0)
        self.actor.parts.parameters.may_change()
        settings = RolloutConfig.model_validate({"max_response_tokens": NEW_TOKENS, "parallel": {"tp": tp}, **rollout})
        self.engine = VllmEngine(settings, self.actor, DTYPES[dtype], MAX_LENGTH - NEW_TOKENS)

    def update(self, model: str, version: int) -> None:
        self.actor.parts.to_compute()
        load_weights(self.actor.shard, self.section.model.model_copy(update={"path": Path(model)}), seed=0)
        self.engine.update_weights(self.actor.shard, version)

    def greedy(self, prompts: list[list[int]]) -> list[list[int]]:
        sampling = Sampling(max_tokens=NEW_TOKENS, greedy=True, end_ids=(EOS,))
        rollouts = self.engine.generate([torch.tensor(p) for p in prompts], [0] * len(prompts), sampling)
        return [row.tolist() for row in rollouts.responses.rows()]

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.engine._parameters.items()}


def _error(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as error:  # noqa: BLE001 -- whatever it is, the test looks at it
        return f"{type(error).__name__}: {error}"
    return ""


def vllm_family(
    runtime: Runtime,
    first: str,
    second: str,
    tp: int,
    parallel: dict[str, Any],
    prompts: list[list[int]],
    dtype: str = "fp32",
) -> dict[str, Any]:
    """What an engine says with two sets of weights, and which parameters vLLM's own loading would fill otherwise."""
    from safetensors.torch import load_file

    from megarlhf.rollout.vllm.patches import cpu_patches

    session = _Session(runtime, first, tp, parallel, dtype)
    assert {tensor.dtype for tensor in session.engine._parameters.values()} == {DTYPES[dtype]}
    head = session.engine._llm.llm_engine.vllm_config.model_config
    assert (head.hf_config.head_dtype, head.head_dtype) == ("float32", torch.float32), "logits are rounded"
    early = _error(lambda: session.greedy(prompts))
    continuations, weights = [], []
    for version, path in enumerate((first, second)):
        session.update(path, version)
        session.engine.verify_weights(session.actor.shard)
        continuations.append(session.greedy(prompts))
        weights.append(session.weights())
    changed = [name for name, value in weights[0].items() if not torch.equal(value, weights[1][name])]

    def by_reload(path: str) -> None:
        tensors = iter(load_file(Path(path) / "model.safetensors").items())
        with cpu_patches(runtime.device):
            session.engine._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})

    def by_load(path: str) -> None:
        session.engine._load(iter(load_file(Path(path) / "model.safetensors").items()))

    different = {}
    for how, path, expected in ((by_reload, first, weights[0]), (by_load, second, weights[1])):
        how(path)
        live = session.engine._llm.apply_model(lambda model: dict(model.named_parameters()))[0]
        assert live.keys() == expected.keys()
        different[how.__name__] = [name for name, value in live.items() if not torch.equal(value, expected[name])]
    session.engine.close()
    return {"early": early, "said": continuations, "different": different, "changed": changed, "all": list(weights[0])}


def vllm_long_prompts(
    runtime: Runtime, model: str, prompts: list[list[int]]
) -> tuple[list[list[int]], list[list[int]], int]:
    """Samples of prompts that are more than a batch of the engine takes: all at once, and one by one; and how often
    one was drawn in the middle of its prompt."""
    find, taken_back = vllm_patches._drawn_too_early, []

    def noted(runner: Any) -> dict[int, torch.Generator]:
        taken_back.append(len(find(runner)))
        return find(runner)

    session = _Session(runtime, model, 1, {}, vllm={"args": {"max_num_batched_tokens": 100, "max_num_seqs": 8}})
    session.update(model, 0)
    sampling, seeds = Sampling(max_tokens=NEW_TOKENS, end_ids=(EOS,)), list(range(len(prompts)))
    rows = [torch.tensor(prompt) for prompt in prompts]
    with mock.patch.object(vllm_patches, "_drawn_too_early", noted):
        together = session.engine.generate(rows, seeds, sampling).responses.rows()
    alone = [session.engine.generate([rows[n]], [n], sampling).responses.rows()[0] for n in seeds]
    session.engine.close()
    return [row.tolist() for row in together], [row.tolist() for row in alone], sum(taken_back)


def vllm_sleeps(
    runtime: Runtime, first: str, second: str, tp: int, level: int, prompts: list[list[int]]
) -> dict[str, Any]:
    """An engine that gives its memory back while the trainer works: what it holds then, and what it says after."""
    from megarlhf.rollout.vllm import sleep

    session = _Session(runtime, first, tp, {"tp": tp}, vllm={"sleep_level": level})
    actor, engine = session.actor.parts, session.engine

    def there() -> list[int]:
        kinds = (session.actor.shard.module.parameters(), engine._parameters.values(), engine._cache_tensors())
        return [sum(tensor.untyped_storage().nbytes() for tensor in kind) for kind in kinds]

    found: dict[str, Any] = {"awake": there()}
    with mock.patch.object(engine, "_resharder_from", wraps=engine._resharder_from) as updates:
        session.update(first, 0)
        said = [session.greedy(prompts)]
        found["in rollout"] = there()
        actor.to_compute()
        found["in training"] = there()
        said.append(session.greedy(prompts))
        found["updates"] = updates.call_count
        actor.to_compute()
        engine.verify_weights(session.actor.shard)
        actor.to_compute()
        session.update(second, 1)
        found["in the update"] = there()
        found["digest"] = engine.verify_weights(session.actor.shard).digest
        said.append(session.greedy(prompts))
        actor.to_compute()
        with mock.patch.object(sleep, "free_bytes", return_value=1 << 10):
            found["no room"] = _error(lambda: session.greedy(prompts))
        said.append(session.greedy(prompts))
        found["host"] = actor.device_memory.host.nbytes
    engine.close()
    return {"said": said, **found}


def vllm_head(runtime: Runtime, model: str, dtype: str) -> dict[str, Any]:
    """Logits of an engine with certified weights, from made-up hidden states; and the same product in fp64."""
    session = _Session(runtime, model, 1, {}, dtype)
    session.update(model, 0)
    session.engine.verify_weights(session.actor.shard)
    weight_VH = session.weights()["model.embed_tokens.weight"]
    hidden_TH = 4 * torch.randn(8, weight_VH.size(1), generator=torch.Generator().manual_seed(0))
    hidden_TH = hidden_TH.to(weight_VH.dtype)
    logits_TV = session.engine._llm.apply_model(lambda live: live.compute_logits(hidden_TH))[0]
    session.engine.close()
    return {
        "weights": {tensor.dtype for tensor in session.engine._parameters.values()},
        "logits": logits_TV,
        "exact": hidden_TH.double() @ weight_VH.double().T[:, : logits_TV.size(1)],
    }


def vllm_tables(runtime: Runtime, model: str) -> dict[str, str]:
    """The error of the first update, for each fault in the table of one rank; at last without a fault."""
    session = _Session(runtime, model, 2, {"tp": 2})
    engine, errors = session.engine, {}
    right = engine._destinations
    for name, (rank, change) in FAULTS.items():
        engine._destinations = [change(part, engine._arch) if part.rank == rank else part for part in right]
        assert engine._destinations != right, name
        errors[name] = _error(lambda: session.update(model, 0))
        assert engine.weight_version == -1
        assert "no weights" in _error(lambda: session.greedy([[5, 6]]))
    engine._destinations = right
    errors["none"] = _error(lambda: session.update(model, 0))
    engine.verify_weights(session.actor.shard)
    engine.close()
    return errors


def _changed(part: RankPlacements, change: Callable[[Placement], Placement | None]) -> RankPlacements:
    """The table with some placements changed, and without those that become None."""
    kept = tuple(new for placement in part.placements if (new := change(placement)) is not None)
    used = {placement.storage for placement in kept}
    storages = {name: shape for name, shape in part.storages.items() if name in used}
    return replace(part, placements=kept, storages=storages)


def _stale(part: RankPlacements, arch: Architecture) -> RankPlacements:
    return vllm_placements(arch, tp=2, tp_rank=0, rank=part.rank)


def _gate_and_up_swapped(part: RankPlacements, arch: Architecture) -> RankPlacements:
    other = {"model.layers.2.mlp.gate_proj.weight": "model.layers.2.mlp.up_proj.weight"}
    other |= {up: gate for gate, up in other.items()}
    return _changed(part, lambda p: replace(p, tensor=other.get(p.tensor, p.tensor)))


def _q_and_k_exchanged(part: RankPlacements, arch: Architecture) -> RankPlacements:
    """The rows of k stand first."""
    size = {p.tensor: p.box.numel for p in part.placements}["model.layers.0.self_attn.k_proj.weight"]
    starts = {"model.layers.0.self_attn.k_proj.weight": 0, "model.layers.0.self_attn.q_proj.weight": size}
    return _changed(part, lambda p: replace(p, offset=starts.get(p.tensor, p.offset)))


def _one_row_less(part: RankPlacements, arch: Architecture) -> RankPlacements:
    """The last row of the vocabulary is taken for padding."""

    def change(p: Placement) -> Placement:
        if p.tensor != "model.embed_tokens.weight":
            return p
        return replace(p, box=Box(p.box.start, (p.box.stop[0] - 1, p.box.stop[1])))

    return _changed(part, change)


def _padded_to_less(part: RankPlacements, arch: Architecture) -> RankPlacements:
    """The vocabulary padded to a row less on each rank."""
    return vllm_placements(arch, tp=2, tp_rank=part.rank, rank=part.rank, padded_vocab=126)


def _no_head(part: RankPlacements, arch: Architecture) -> RankPlacements:
    """As if the head were tied."""
    return _changed(part, lambda p: None if p.storage == "lm_head.weight" else p)


def _head_from_embedding(part: RankPlacements, arch: Architecture) -> RankPlacements:
    """As if the head were a copy of the embedding."""
    other = {"lm_head.weight": "model.embed_tokens.weight"}
    return _changed(part, lambda p: replace(p, tensor=other.get(p.storage, p.tensor)))


FAULTS: dict[str, tuple[int, Callable[[RankPlacements, Architecture], RankPlacements]]] = {
    "stale rank": (1, _stale), "gate and up": (1, _gate_and_up_swapped), "q and k": (0, _q_and_k_exchanged),
    "one row less": (1, _one_row_less), "padded to less": (1, _padded_to_less), "no head": (0, _no_head),
    "head from embedding": (0, _head_from_embedding),
}  # fmt: skip
"""Of the table of one rank."""


def vllm_broken(runtime: Runtime, first: str, second: str, prompts: list[list[int]]) -> dict[str, Any]:
    """Two updates; between them one whose transfer fails on rank 1, and after them one whose plan lacks a copy."""
    session = _Session(runtime, first, 2, {"pp": 2}, poison_weights=True, reshard_bucket_mib=1)
    engine = session.engine
    observed: dict[str, Any] = {}
    session.update(first, 0)
    observed["first"] = session.greedy(prompts)
    kept = reshard._copy_inside
    if runtime.rank == 1:
        reshard._copy_inside = _no_memory
    observed["fault"] = _error(lambda: session.update(second, 1))
    reshard._copy_inside = kept
    observed["version"] = engine.weight_version
    observed["refused"] = _error(lambda: session.greedy(prompts))
    session.update(second, 2)
    observed["second"] = session.greedy(prompts)
    observed["second_version"] = engine.weight_version
    with _a_copy_less(engine, runtime, "model.norm.weight"):
        observed["poison"] = _error(lambda: session.update(first, 3))
    observed["still_refused"] = _error(lambda: session.greedy(prompts))
    session.update(first, 4)
    observed["last"] = session.greedy(prompts)
    engine.close()
    return observed


def vllm_failing_steps(runtime: Runtime, model: str, prompts: list[list[int]]) -> dict[str, tuple[str, str]]:
    """(error, what `generate` then says) for each local step of the engine, as it fails on rank 1 alone."""
    from megarlhf.rollout.vllm import engine as vllm_engine
    from megarlhf.weights.checks import certificate

    session = _Session(runtime, model, 2, {"pp": 2}, poison_weights=True)
    engine, part, errors = session.engine, session.actor.shard, {}

    def tried(action: Callable[[], Any]) -> tuple[str, str]:
        return _error(action), _error(lambda: session.greedy(prompts))

    def without_memory(owner: Any, name: str, action: Callable[[], Any]) -> None:
        kept = getattr(owner, name)
        if runtime.rank == 1:
            setattr(owner, name, _no_memory)
        errors[name] = tried(action)
        setattr(owner, name, kept)

    without_memory(vllm_engine, "changed_in_memory", engine._check_memory)
    # The first three before the table is known to be right, `make_plan` before there is a plan.
    for owner, name in (
        (vllm_engine, "sample_tensors"), (vllm_engine, "zero_padding"), (engine, "_load"), (vllm_engine, "make_plan"),
        (vllm_engine, "poison"), (vllm_engine, "storages_with_nan"), (engine._llm, "reset_prefix_cache"),
    ):  # fmt: skip
        without_memory(owner, name, lambda: session.update(model, 0))
    assert engine.weight_version == -1
    for owner, name in (
        (engine, "_replaced"), (vllm_engine, "nonzero_padding"), (certificate, "digest_boxes"),
        (certificate, "replica_digests"),
    ):  # fmt: skip
        session.update(model, 0)
        assert _error(lambda: session.greedy(prompts)) == ""
        without_memory(owner, name, lambda: engine.verify_weights(part))
    session.update(model, 1)
    padding = engine._parameters["lm_head.weight"].detach()[-1, :2] if runtime.rank == 1 else torch.zeros(2)
    padding.copy_(torch.tensor([torch.nan, 1e-3]))
    errors["padding"] = tried(lambda: engine.verify_weights(part))
    padding.zero_()
    session.update(model, 2)
    errors["none"] = tried(lambda: engine.verify_weights(part))
    engine.close()
    return errors


def _no_memory(*arguments: Any, **options: Any) -> Any:
    raise torch.OutOfMemoryError("planted")


@contextmanager
def _a_copy_less(engine: Any, runtime: Runtime, tensor: str) -> Iterator[None]:
    """Takes out of the plan what rank 1 copies of a tensor from itself."""
    plan, resharder = engine._plan, engine._resharder
    copies = tuple(c for c in plan.copies if c.tensor != tensor or (c.src_rank, c.dst_rank) != (1, 1))
    assert len(plan.copies) - len(copies) == (runtime.rank == 1)
    engine._plan, engine._resharder = CopyPlan(copies, plan.traffic, plan.only_rank), None
    yield
    engine._plan, engine._resharder = plan, resharder


def vllm_packed_experts(runtime: Runtime, model: str) -> str:
    """The error of an engine that was built without the patch that leaves experts as they are."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    from megarlhf.rollout.vllm import patches as vllm_patches

    ours = vllm_patches._keep_experts
    vllm_patches._keep_experts = CPUUnquantizedExperts.process_weights_after_loading
    try:
        return _error(lambda: _Session(runtime, model, 1, {}))
    finally:
        vllm_patches._keep_experts = ours
