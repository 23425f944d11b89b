"""LoRA adapters on disk as PEFT keeps them: adapter_config.json and adapter_model.safetensors.

PEFT's name of a tensor is ours behind `base_model.model.`.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megarlhf.architectures.adapters import ALL_LINEAR, EXPERT, A, B, adapter_on, find_adapter, linear_modules
from megarlhf.architectures.architecture import Adapter, Architecture
from megarlhf.architectures.placements import Head, head_name, logical_tensors
from megarlhf.atomic_write import sync
from megarlhf.config import LoraConfig
from megarlhf.placement import Box, Placement, RankPlacements, Shape, contiguous_strides
from megarlhf.weights.checkpoint.formats.huggingface.read import read_header
from megarlhf.weights.transport.extent import CheckpointWeights, Extent

log = logging.getLogger(__name__)

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
RANK = 16

_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layer_replication": (None,),
    "target_parameters": (None, []),
    "trainable_token_indices": (None,),
    "alora_invocation_tokens": (None,),
    "use_bdlora": (None,),
    "arrow_config": (None,),
    "lora_ga_config": (None,),
    "megatron_config": (None,),
}
"""Keys of adapter_config.json that make another thing of an adapter, and the values that do not."""


@dataclass(frozen=True)
class StoredAdapter:
    """An adapter on disk."""

    directory: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Extent]
    """Tensors on disk by the names of logical tensors."""

    @property
    def base(self) -> str | None:
        """The model that it says it was trained on."""
        name = self.config.get("base_model_name_or_path")
        return name if isinstance(name, str) and name else None

    def adapter(self, arch: Architecture) -> Adapter:
        """The adapter for a model of this architecture.

        Raises: ValueError where it has been trained on another architecture.
        """
        rank = self.config["r"]
        layers: dict[str, list[int]] = {}
        known = {end for end in self.tensors if end.endswith(A)}
        expected: set[str] = set()
        for layer, module, name in linear_modules(arch):
            names = [name.replace(EXPERT, str(n)) for n in range(arch.num_experts)] if EXPERT in name else [name]
            if any(linear + A in known for linear in names):
                layers.setdefault(module, []).append(layer)
                expected |= {linear + end for linear in names for end in (A, B)}
        heads = {head_name(arch, "scalar")}
        if strange := [name for name in self.tensors if name not in expected | heads]:
            raise ValueError(
                f"{self.directory}: {len(strange)} of its {len(self.tensors)} tensors belong to no linear layer of "
                f"this model, such as {strange[0]}: it is an adapter of another base"
                + (f" ({self.base})" if self.base else "")
                + ", or of embeddings or heads, which have none here"
            )
        adapter = adapter_on(
            arch, layers, rank=rank, alpha=float(self.config["lora_alpha"]), rslora=bool(self.config.get("use_rslora"))
        )
        shapes = logical_tensors(_with(arch, adapter)) | logical_tensors(_with(arch, adapter), "scalar")
        problems = [f"{name} is missing" for name in sorted(expected - self.tensors.keys())]
        problems += [
            f"{name} has shape {extent.shape}, expected {shapes[name]}"
            for name, extent in self.tensors.items()
            if name in shapes and extent.shape != shapes[name]
        ]
        if problems:
            more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
            raise ValueError(
                f"{self.directory} does not fit the model: {'; '.join(problems[:3])}{more}. Is it an adapter of "
                "another base" + (f" ({self.base})?" if self.base else "?")
            )
        return adapter

    def weights(self, shapes: Mapping[str, Shape]) -> CheckpointWeights:
        """Tensors of the given names and shapes, to be loaded as from any checkpoint."""
        placements = tuple(
            Placement(name, Box.whole(shape), name, 0, contiguous_strides(shape)) for name, shape in shapes.items()
        )
        part = RankPlacements(0, dict(shapes), placements, dict(shapes))
        return CheckpointWeights(self.directory, (part,), ({name: self.tensors[name] for name in shapes},))


def open_adapter(directory: Path) -> StoredAdapter:
    """Raises: ValueError for what is no LoRA adapter of PEFT's, or one that does more than LoRA."""
    if not (directory / CONFIG).is_file():
        raise ValueError(
            f"lora.path = {directory} has no {CONFIG}; give a directory that PEFT's save_pretrained, or an export of "
            "this program (ROLE_adapter), has written"
        )
    try:
        config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
        kind, rank, alpha = config.get("peft_type", "LORA"), config["r"], config["lora_alpha"]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{directory / CONFIG} is damaged ({error!r}); copy it again from its source") from None
    if kind != "LORA":
        raise ValueError(f"{directory / CONFIG} has peft_type {kind!r}; LORA is supported")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float) or alpha <= 0:
        raise ValueError(f"{directory / CONFIG} has r = {rank!r} and lora_alpha = {alpha!r}, expected positive numbers")
    for key, plain in _PLAIN.items():
        if key in config and config[key] not in plain:
            raise ValueError(
                f"{directory / CONFIG} has {key} = {config[key]!r}: such an adapter computes something else than LoRA "
                "with one rank; use one without it, or merge it into its base by PEFT"
            )
    if not (directory / WEIGHTS).is_file():
        raise ValueError(f"{directory} has no {WEIGHTS}; save the adapter as safetensors")
    tensors = {}
    for name, extent in read_header(directory / WEIGHTS).items():
        tensors[name.removeprefix(PREFIX)] = extent
    return StoredAdapter(directory, config, tensors)


def brings_head(directory: Path, arch: Architecture) -> bool:
    """Whether the adapter has a scalar head with it, as one of a reward model has."""
    return head_name(arch, "scalar") in open_adapter(directory).tensors


def adapted(arch: Architecture, lora: LoraConfig | None, role: str = "actor") -> Architecture:
    """The architecture of a role with this section `lora`.

    Raises: ValueError that names the key.
    """
    if lora is None:
        return arch
    try:
        adapter = _new(arch, lora) if lora.path is None else _stored(arch, lora, lora.path)
    except ValueError as error:
        raise ValueError(f"{role}.lora: {error}") from None
    return _with(arch, adapter)


def _with(arch: Architecture, adapter: Adapter) -> Architecture:
    return replace(arch, adapter=adapter)


def _patterns(lora: LoraConfig) -> tuple[str, ...]:
    return (ALL_LINEAR,) if lora.targets in (None, ALL_LINEAR) else tuple(lora.targets or ())


def _new(arch: Architecture, lora: LoraConfig) -> Adapter:
    rank = lora.rank or RANK
    return find_adapter(arch, _patterns(lora), rank=rank, alpha=lora.alpha or 2.0 * rank, rslora=bool(lora.rslora))


def _stored(arch: Architecture, lora: LoraConfig, path: Path) -> Adapter:
    adapter = open_adapter(path).adapter(arch)
    stated = {"rank": adapter.rank, "alpha": adapter.alpha, "rslora": adapter.rslora}
    for key, value in stated.items():
        given = getattr(lora, key)
        if given is not None and given != value:
            raise ValueError(
                f"{key} = {given}, and the adapter at {path} has {value}; leave {key} out, or start from another "
                "adapter"
            )
    if lora.targets is not None:
        wanted = find_adapter(arch, _patterns(lora), rank=adapter.rank, alpha=adapter.alpha, rslora=adapter.rslora)
        if wanted.targets != adapter.targets:
            names = ", ".join(target.module for target in adapter.targets)
            raise ValueError(
                f"targets = {lora.targets} are not the linear layers that the adapter at {path} has ({names}); leave "
                "targets out, or start from another adapter"
            )
    return adapter


def notes_of(role: str, lora: LoraConfig, model: Path) -> list[str]:
    """Notes for the user on the adapter that a role starts from."""
    if lora.path is None:
        return []
    stored, notes = open_adapter(lora.path), []
    if stored.config.get("lora_dropout"):
        notes.append(
            f"{role}.lora: {lora.path} was trained with dropout {stored.config['lora_dropout']}; here it has none"
        )
    base = stored.base
    if base is not None and Path(base).absolute() != model.absolute() and Path(base).resolve() != model.resolve():
        notes.append(
            f"WARNING: {role}.lora: the adapter at {lora.path} says that its base is {base}, and {role}.model.path is "
            f"{model}: shapes fit, which does not show that it is the same model"
        )
    return notes


def adapter_config(adapter: Adapter, arch: Architecture, head: Head, base: str) -> dict[str, Any]:
    """An adapter_config.json that PEFT loads.

    Of a mixture of experts the scale is stated without `use_rslora`: transformers 5 keeps gate and up of all experts in
    one tensor, and PEFT joins their adapters to one of twice the rank and twice alpha, which keeps alpha / r only.
    """
    if all(target.layers is None for target in adapter.targets):
        targets: list[str] | str = sorted({_end(target.module) for target in adapter.targets})
    else:
        targets = _regex(adapter, arch)
    plain = adapter.rslora and bool(arch.num_experts)
    alpha = adapter.scale * adapter.rank if plain else float(adapter.alpha)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if head == "lm" else "SEQ_CLS",
        "base_model_name_or_path": base,
        "r": adapter.rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "lora_dropout": 0.0,
        "use_rslora": adapter.rslora and not plain,
        "target_modules": targets,
        "fan_in_fan_out": arch.model_type == "gpt2",
        "bias": "none",
        "modules_to_save": ["score"] if head == "scalar" else None,
        "inference_mode": True,
        "init_lora_weights": True,
    }


def require_readable_by_peft(arch: Architecture) -> None:
    """PEFT makes of the adapters of experts' gate and up one, around which it expects that of down.

    Raises: ValueError for an adapter of which PEFT would leave out some of it without a word.
    """
    assert arch.adapter is not None
    layers = {target.module: target.layers for target in arch.adapter.targets if EXPERT in target.module}
    *joined, outer = dict.fromkeys(module for _, module, _ in linear_modules(arch) if EXPERT in module) or [""]
    if not layers.keys() & set(joined):
        return
    if outer not in layers or len({layers.get(module, ()) for module in joined}) > 1:
        names = [_end(module) for module in joined]
        raise ValueError(
            f"the experts' adapter is on {', '.join(map(_end, layers))}, and PEFT reads those of {' and '.join(names)} "
            f"only where both are on the same layers and {_end(outer)} has one too: name all three in targets, or "
            "export merged"
        )


def _end(module: str) -> str:
    """The end of its name by which PEFT finds a linear layer; of experts what follows their number, from which PEFT
    makes the name of the tensor that transformers 5 keeps all of them in."""
    return module.rpartition(f"{EXPERT}.")[2]


def _regex(adapter: Adapter, arch: Architecture) -> str:
    """The modules of an adapter that is not on every layer, as one regular expression over whole names. That of experts
    also matches the names that PEFT tries for the tensors of all experts: without a number, and behind the name that
    transformers 5 has for their layer."""
    prefix = {module: name.removesuffix(module) for layer, module, name in linear_modules(arch) if layer == 0}
    parts = []
    for target in adapter.targets:
        start, _, rest = prefix[target.module].rpartition("0")
        layers = r"\d+" if target.layers is None else f"({'|'.join(map(str, target.layers))})"
        inside = re.escape(target.module)
        if EXPERT in target.module:
            inside = rf"\w+\.experts\.(\d+\.)?{re.escape(_end(target.module))}"
        parts.append(f"{re.escape(start)}{layers}{re.escape(rest)}{inside}")
    return "|".join(f"(?:{part})" for part in parts)


def write_adapter(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write adapter_config.json and adapter_model.safetensors. The tensors are in the host's memory, by the names of
    logical tensors."""
    from safetensors.torch import save

    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    content = save({PREFIX + name: tensor.contiguous() for name, tensor in tensors.items()}, {"format": "pt"})
    (directory / WEIGHTS).write_bytes(content)
    for name in (CONFIG, WEIGHTS):
        sync(directory / name)
