"""Scaled rotary frequencies are transformers', bit for bit, and the turn of a part of a head is what it says.

Not covered: logits (tests/distributed/test_families.py) and vLLM (tests/distributed/test_vllm_families.py).
"""

from typing import Any

import pytest
import torch

from megarlhf.architectures.hf_config import architecture_from_hf
from megarlhf.models.attention.rotary_frequencies import attention_factor, scaled_frequencies
from megarlhf.models.elementwise import rotate

HEAD = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 2048}
FACTORS = {"short_factor": [1 + 0.01 * n for n in range(32)], "long_factor": [2.0] * 32}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    "yarn": YARN,
    "yarn with bounds": {**YARN, "beta_fast": 64.0, "beta_slow": 2.0, "attention_factor": 0.9, "truncate": False},
    "yarn with mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4},
    # Both bounds are the first channel.
    "yarn of one bound": {**YARN, "beta_fast": 700.0, "beta_slow": 652.0, "original_max_position_embeddings": 4096},
    "longrope": {"rope_type": "longrope", "rope_theta": 1e4, **FACTORS, "original_max_position_embeddings": 4096},
}


@pytest.mark.parametrize("name", ROPES)
def test_frequencies_are_those_of_transformers(name) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(**HEAD, rope_parameters=dict(ROPES[name]))
    theirs, factor = ROPE_INIT_FUNCTIONS[ROPES[name]["rope_type"]](config)
    arch = architecture_from_hf(config.to_dict())
    plain = 1.0 / (arch.rope_theta ** (torch.arange(0, 64, 2, dtype=torch.float32) / 64))
    assert arch.rope_scaling is not None
    ours = scaled_frequencies(plain, arch.rope_theta, arch.rope_scaling)
    assert torch.equal(ours, theirs)
    assert attention_factor(arch.rope_scaling) == pytest.approx(factor, rel=1e-12)
    assert torch.equal(ours, plain) == (name == "dynamic"), "nothing was scaled"


def test_the_rest_of_a_head_stays_as_it_is() -> None:
    """Of six channels the first four: (1, 3) by a quarter turn, (2, 4) by none; and back again, the gradient."""
    x_TND = torch.tensor([[[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]], requires_grad=True)
    cos_T1D, sin_T1D = torch.tensor([[[0.0, 1.0]]]), torch.tensor([[[1.0, 0.0]]])
    turned_TND = rotate(x_TND, cos_T1D, sin_T1D)
    assert turned_TND.tolist() == [[[-3.0, 2.0, 1.0, 4.0, 5.0, 6.0]]]
    turned_TND.backward(turned_TND.detach())
    assert x_TND.grad is not None
    assert torch.equal(x_TND.grad, x_TND.detach())
