"""vLLM engine that applies the actor's adapter itself: `rollout.lora: adapter`.

vLLM keeps A and scale x B of the adapter in buffers beside its layers. They are storages like its parameters: a copy
plan fills them in place, and the certificate covers them. The base is sent once. vLLM's own way of loading an adapter
is used once, to prove that the table has A and B in the right places.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from megarlhf.architectures.adapters import adapter_tensors
from megarlhf.architectures.placements import logical_tensors
from megarlhf.architectures.vllm_adapters import RANKS, SLOTS, adapter_slots, vllm_adapter_placements
from megarlhf.config import RolloutConfig
from megarlhf.models.build import ModelShard
from megarlhf.models.role import Role
from megarlhf.placement import RankPlacements, merge_ranks
from megarlhf.rollout.vllm.build import adapter_request
from megarlhf.rollout.vllm.engine import VllmEngine
from megarlhf.weights.checks.loader_check import check_loader
from megarlhf.weights.plan.copy_plan import make_plan
from megarlhf.weights.transport.reshard import Resharder


class VllmAdapterEngine(VllmEngine):
    """An engine whose requests all use the actor's adapter."""

    _uses_adapter = True

    def __init__(self, rollout: RolloutConfig, actor: Role, dtype: torch.dtype, max_prompt_tokens: int) -> None:
        adapted = actor.shard.arch
        assert adapted.adapter is not None
        self._adapted = adapted
        self._slot_rank = next(rank for rank in RANKS if rank >= adapted.adapter.rank)
        self._adapter_only: Resharder | None = None
        self._has_base = False
        super().__init__(rollout, actor, dtype, max_prompt_tokens)
        self._activate()

    def _arguments(self) -> dict[str, Any]:
        return {"enable_lora": True, "max_loras": 1, "max_lora_rank": self._slot_rank}

    def _activate(self) -> None:
        """Activate an adapter of zeros in vLLM's slot. Updates fill it."""
        manager = self._llm.llm_engine.model_executor.driver_worker.worker.model_runner.lora_manager
        manager.add_dummy_lora(adapter_request(), self._slot_rank)
        manager._adapter_manager.activate_adapter(1)

    def _live(self, *, every_name: bool = False) -> dict[str, Tensor]:
        def tensors(model: torch.nn.Module) -> dict[str, Tensor]:
            slots = _slots_in(model)
            with _unwrapped(model):
                return {**dict(model.named_parameters(remove_duplicate=not every_name)), **slots}

        live: dict[str, Tensor] = self._llm.apply_model(tensors)[0]
        return live

    def _loaded(self) -> Mapping[str, Tensor]:
        return {name: tensor for name, tensor in self._parameters.items() if not _is_slot(name)}

    def _make_destinations(self) -> list[RankPlacements]:
        parts = []
        for base in super()._make_destinations():
            adapter = vllm_adapter_placements(
                self._adapted, self._slot_rank, tp=self._tp, tp_rank=base.rank % self._tp, rank=base.rank
            )
            slots = {name: tuple(tensor.shape) for name, tensor in self._parameters.items() if _is_slot(name)}
            # Slots of layers without an adapter have no placement, so they have to be zero.
            others = {name: shape for name, shape in slots.items() if name not in adapter.storages}
            parts.append(merge_ranks([base, adapter, RankPlacements(base.rank, others, (), {})]))
        return parts

    def _model_of(self, actor: ModelShard) -> ModelShard:
        return actor

    def _values_of(self, actor: ModelShard) -> dict[str, Tensor]:
        return actor.scaled()

    def _table_problems(self, actor: ModelShard) -> list[str]:
        whole, names = self._destinations[self._runtime.rank], adapter_tensors(self._adapted)
        slots = {name: tensor for name, tensor in self._parameters.items() if _is_slot(name)}
        base, of_slots = (
            RankPlacements(
                whole.rank,
                {name: shape for name, shape in whole.storages.items() if _is_slot(name) == slot},
                tuple(p for p in whole.placements if (p.tensor in names) == slot),
                {name: shape for name, shape in whole.tensors.items() if (name in names) == slot},
            )
            for slot in (False, True)
        )
        shapes = {name: shape for name, shape in logical_tensors(self._adapted).items() if name in names}
        kept, self._destinations[self._runtime.rank] = self._destinations[self._runtime.rank], base
        parameters, self._parameters = self._parameters, dict(self._loaded())
        try:
            problems = super()._table_problems(actor)
        finally:
            self._destinations[self._runtime.rank], self._parameters = kept, parameters
        return problems + check_loader(of_slots, slots, self._load_adapter, shapes, self._dtype)

    def _load(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        def load(model: Any) -> None:
            with _unwrapped(model):
                model.load_weights(tensors)

        self._llm.apply_model(load)

    def _load_adapter(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Fill the slots by vLLM's own function."""
        by_name = dict(tensors)

        def load(model: torch.nn.Module) -> None:
            for module, names in adapter_slots(self._adapted).items():
                a, b = ([None if pair is None else by_name[pair[n]] for pair in names] for n in (0, 1))
                layer: Any = model.get_submodule(module)
                several = len(names) > 1
                layer.set_lora(0, a if several else a[0], b if several else b[0])

        self._llm.apply_model(load)

    def _transfer(self, resharder: Resharder, actor: ModelShard) -> None:
        """Send base and adapter the first time, and when the base is lost; otherwise the adapter alone."""
        if self._rollout.poison_weights or self._sleeper.weights_lost or not self._has_base:
            super()._transfer(resharder, actor)
            self._has_base = True
            return
        if self._adapter_only is None:
            names = sorted(adapter_tensors(self._adapted))
            parts = [[part.select(names) for part in side] for side in (self._sources, self._destinations)]
            self._adapter_only = Resharder(
                make_plan(*parts, only_rank=self._runtime.rank),
                rank=self._runtime.rank,
                dtype=self._dtype,
                device=self._runtime.device,
                bucket_bytes=self._rollout.reshard_bucket_mib << 20,
                free_bytes=self._free_bytes,
                keep_views=False,
            )
        self._adapter_only.run(self._values_of(actor), self._parameters)


def _is_slot(name: str) -> bool:
    return name.rpartition(".")[0].endswith(SLOTS)


def _slots_in(model: torch.nn.Module) -> dict[str, Tensor]:
    """Buffers of vLLM's first slot, by layer, letter and number of the layer's part."""
    slots = {}
    for name, layer in model.named_modules():
        for letter, end in zip("ab", SLOTS, strict=True):
            for number, stacked in enumerate(getattr(layer, f"lora_{letter}_stacked", ())):
                slots[f"{name}{end}.{number}"] = stacked.view(stacked.shape[-2:])
    return slots


@contextlib.contextmanager
def _unwrapped(model: torch.nn.Module) -> Iterator[None]:
    """Give vLLM's model its original layers and names inside the block, without the wrappers of adapters."""
    wrapped = []
    for name, layer in list(model.named_modules()):
        base = getattr(layer, "base_layer", None)
        if hasattr(layer, "lora_a_stacked") and base is not None:
            parent, _, last = name.rpartition(".")
            wrapped.append((model.get_submodule(parent), last, layer))
            setattr(model.get_submodule(parent), last, base)
    try:
        yield
    finally:
        for parent_module, last, layer in wrapped:
            setattr(parent_module, last, layer)
