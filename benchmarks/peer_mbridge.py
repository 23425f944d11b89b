"""mbridge 0.15.1: Hugging Face -> Megatron in memory -> Hugging Face, one process, TP1, CPU.

    python -m benchmarks.peer_mbridge --hf DIR --out DIR --json FILE      (through benchmarks.peers.run)

It does not run as published without CUDA and TransformerEngine. What is different here (`PATCHED`):
  the CPU for CUDA              `get_model` calls .cuda() and torch.cuda.current_device(), and Megatron-Core makes
                                parameters on the current CUDA device; megatron_device has both mean the CPU
  Megatron-Core's local spec    LLMBridge asks for layers of TransformerEngine, which needs CUDA
  names of the local norms      its table only has those of TransformerEngine, where a norm is part of a linear layer
  rope_theta of the config      it reads `config.rope_theta`, which transformers 5 keeps in `rope_parameters`
The last three are overrides in a subclass that its own `register_model` takes; mbridge's code stays as it is.

What it is asked for (`SETTINGS`): no random values before loading, an option of the configuration: making them takes
Megatron-Core's CUDA random state ("cuda rng state model-parallel-rng is not added"), and time. Otherwise its defaults.
"""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import torch

from benchmarks.peers import join_alone, measure, peer_arguments
from megarlhf.parallel.megatron_cpu import megatron_device

warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine).*")

from mbridge import AutoBridge  # type: ignore[import-not-found]  # noqa: E402
from mbridge.core import register_model  # type: ignore[import-not-found]  # noqa: E402
from mbridge.models.llama import LLaMABridge  # type: ignore[import-not-found]  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402

PATCHED = (
    "torch.cuda functions, .cuda() and cuda device arguments mean the CPU (megarlhf.parallel.megatron_cpu)",
    "layers of Megatron-Core's local spec instead of TransformerEngine's",
    "names of the local spec's norms added to the table of Llama",
    "rope_theta taken from transformers 5's rope_parameters",
)
SETTINGS = ("perform_initialization=False",)


@register_model("llama")
class LocalLlama(LLaMABridge):
    """mbridge's Llama, with the layers that Megatron-Core has without TransformerEngine."""

    _MLP_MAPPING: ClassVar = {
        **LLaMABridge._MLP_MAPPING,
        "pre_mlp_layernorm.weight": ["model.layers.{layer_number}.post_attention_layernorm.weight"],
    }
    _OTHER_MAPPING: ClassVar = {
        "input_layernorm.weight": ["model.layers.{layer_number}.input_layernorm.weight"],
    }

    def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> Any:
        return get_gpt_layer_local_spec(normalization="RMSNorm")

    def _get_gptmodel_args(self) -> dict[str, Any]:
        self.hf_config.rope_theta = self.hf_config.rope_parameters["rope_theta"]
        return super()._get_gptmodel_args()


def main() -> None:
    arguments = peer_arguments(__doc__)
    join_alone()
    bridges: list[Any] = []

    def to_megatron() -> Any:
        bridge = AutoBridge.from_pretrained(str(arguments.hf))
        bridge.set_extra_args(perform_initialization=False)
        bridges.append(bridge)
        return bridge.get_model(weight_path=str(arguments.hf))

    def to_hf(models: Any) -> None:
        bridges[0].save_weights(models, str(arguments.out))

    with megatron_device(torch.device("cpu")):
        measure("mbridge", arguments, to_megatron=to_megatron, to_hf=to_hf, patched=PATCHED, settings=SETTINGS)


if __name__ == "__main__":
    main()
