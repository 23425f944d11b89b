"""Description of a checkpoint in a few facts: format, layout, architecture, sizes."""

from __future__ import annotations

import torch

from megarlhf.architectures.placements import logical_tensors
from megarlhf.weights.checkpoint.open_checkpoint import Checkpoint


def describe(checkpoint: Checkpoint) -> dict[str, object]:
    """Facts about a checkpoint by name, in the order to print them."""
    arch, layout = checkpoint.arch, checkpoint.layout
    tensors = logical_tensors(arch, checkpoint.head)
    parameters = sum(torch.Size(shape).numel() for shape in tensors.values())
    files = {extent.path for extents in checkpoint.weights.extents for extent in extents.values()}
    facts: dict[str, object] = {"format": checkpoint.format}
    if layout is not None:
        facts["layout"] = f"tp {layout.tp}, pp {layout.pp}, vpp {layout.vpp}, ep {layout.ep}"
        if layout.layers_per_stage is not None:
            facts["layers per stage"] = ", ".join(map(str, layout.layers_per_stage))
        facts["spec"] = layout.spec if not arch.num_experts else f"{layout.spec}, experts {layout.experts}"
        facts["padded vocabulary"] = layout.padded_vocab
    if checkpoint.iteration is not None:
        facts["iteration"] = checkpoint.iteration
    if checkpoint.foreign:
        facts["arguments not read"] = ", ".join(f"{name} ({kind})" for name, kind in checkpoint.foreign.items())
    if checkpoint.tokenizer is not None:
        facts["tokenizer of the run"] = checkpoint.tokenizer
    return facts | {
        "architecture": f"{arch.model_type}, {'language model' if checkpoint.head == 'lm' else 'scalar head'}",
        "layers": arch.num_layers,
        "hidden": arch.hidden_size,
        "heads": f"{arch.num_heads} of {arch.head_dim}, {arch.num_kv_heads} KV",
        "MLP": arch.ffn_size if not arch.num_experts else f"{arch.num_experts} experts of {arch.expert_ffn_size}",
        "vocabulary": f"{arch.vocab_size}{', tied' if arch.tied_embeddings else ''}",
        "positions": f"{arch.max_positions}, {arch.positions}",
        "parameters": parameters,
        "dtype": ", ".join(str(dtype).removeprefix("torch.") for dtype in checkpoint.weights.dtypes()),
        "tensors": f"{len(tensors)} logical, {sum(map(len, checkpoint.weights.extents))} stored",
        "files": f"{len(files)}, {sum(path.stat().st_size for path in files) / 1e9:.3f} GB",
        "config and tokenizer": checkpoint.companion or "none; from the arguments",
    }
