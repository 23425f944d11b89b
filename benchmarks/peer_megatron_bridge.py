"""Megatron-Bridge 0.3.1: Hugging Face -> Megatron in memory -> Hugging Face, one process, TP1, CPU.

    python -m benchmarks.peer_megatron_bridge --hf DIR --out DIR --json FILE      (through benchmarks.peers.run)

It does not run as published without CUDA and TransformerEngine. What is different here (`PATCHED`):
  an empty transformer_engine   its LoRA layers import it and derive from te.Linear; it is there only while
                                megatron.bridge is imported, and Megatron-Core's layers are imported before it
  the CPU for CUDA              Megatron-Core and the provider name the current CUDA device
  Megatron-Core's local spec    the provider's default is TransformerEngine's; its own `local_layer_spec` is used
  two fusions off               the Llama provider asks for apply_rope_fusion (TransformerEngine) and
                                persist_layer_norm (Apex); Megatron-Core refuses both without them
Of what it requires by name only omegaconf is imported on this path and installed; it runs with transformers 5, though
its metadata says transformers<5 (it then reads no rope_theta, which is no weight).

What it is asked for (`SETTINGS`): what its `import_ckpt` does, without writing Megatron's checkpoint; and for the way
back `save_hf_weights` and the configuration, because `save_hf_pretrained` also wants a tokenizer, which a model of
random weights lacks.
"""

from __future__ import annotations

import contextlib
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.peers import join_alone, measure, peer_arguments
from megarlhf.parallel.megatron_cpu import megatron_device

warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine).*")

# Before the stand-in below: these must find that there is no TransformerEngine.
from megatron.core.models.gpt import gpt_layer_specs, gpt_model  # noqa: E402, F401
from megatron.core.transformer import attention  # noqa: E402

PATCHED = (
    "empty module transformer_engine while megatron.bridge is imported (its LoRA layers derive from te.Linear)",
    "torch.cuda functions, .cuda() and cuda device arguments mean the CPU (megarlhf.parallel.megatron_cpu)",
    "provider.transformer_layer_spec = local_layer_spec instead of TransformerEngine's",
    "provider.apply_rope_fusion = provider.persist_layer_norm = False (need TransformerEngine and Apex)",
)
SETTINGS = (
    "use_cpu_initialization=True, wrap_with_ddp=False, as its import_ckpt",
    "save_hf_weights and config.save_pretrained: the model has no tokenizer for save_hf_pretrained",
)


@contextlib.contextmanager
def empty_transformer_engine() -> Iterator[None]:
    """Scope in which `transformer_engine.pytorch` can be imported: two classes that nobody makes an object of."""
    package = types.ModuleType("transformer_engine")
    module = types.ModuleType("transformer_engine.pytorch")
    linear = type("Linear", (torch.nn.Module,), {})
    operations = types.SimpleNamespace(Sequential=type("Sequential", (torch.nn.Module,), {}))
    vars(module).update(Linear=linear, ops=operations)
    vars(package).update(pytorch=module, __path__=[])
    sys.modules.update({package.__name__: package, module.__name__: module})
    try:
        yield
    finally:
        for name in (package.__name__, module.__name__):
            del sys.modules[name]


with empty_transformer_engine():
    from megatron.bridge import AutoBridge
    from megatron.bridge.models.gpt_provider import local_layer_spec
assert not attention.HAVE_TE, "Megatron-Core has seen the empty transformer_engine; import it earlier"


def main() -> None:
    arguments = peer_arguments(__doc__)
    join_alone()
    bridges: list[Any] = []

    def to_megatron() -> Any:
        bridge = AutoBridge.from_hf_pretrained(str(arguments.hf))
        bridges.append(bridge)
        provider = bridge.to_megatron_provider()
        provider.transformer_layer_spec = local_layer_spec
        provider.apply_rope_fusion = provider.persist_layer_norm = False
        provider.finalize()
        return provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)

    def to_hf(models: Any) -> None:
        bridges[0].hf_pretrained.config.save_pretrained(str(arguments.out))
        bridges[0].save_hf_weights(models, str(arguments.out))

    with megatron_device(torch.device("cpu")):
        measure("megatron-bridge", arguments, to_megatron=to_megatron, to_hf=to_hf, patched=PATCHED, settings=SETTINGS)


if __name__ == "__main__":
    main()
