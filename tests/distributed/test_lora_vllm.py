"""vLLM with an actor's adapter, merged into its weights and as an adapter of its own: the same log-probs, which are the
trainer's; and the certificate finds a wrong adapter either way.

Not covered: GPUs, where vLLM's LoRA layers are other kernels.
"""

import numpy as np
import pytest

from tests.distributed.lora import write_adapter

PROMPTS = [[1, 5, 6, 7], [1, 4, 9], [1, 11, 8, 4, 15, 6], [1, 13]]
LIMIT = 1e-4


@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_merged_and_as_an_adapter_vllm_says_the_same(tp, vllm_ranks, models, tmp_path) -> None:
    """Two adapters one after the other, on some of q, k, v in one layer and none of them in another; the base of the
    actor and, with an adapter of its own, of the engine is the first one's still."""
    targets = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
    adapters = [str(write_adapter(tmp_path / f"{n}", models["plain"], targets=targets, seed=n)) for n in (1, 2)]
    found = {
        how: vllm_ranks.run(tp, "vllm_with_adapter", str(models["plain"]), adapters, tp, PROMPTS, how)[0]
        for how in ("merged", "adapter")
    }
    merged, adapter = found["merged"], found["adapter"]
    for engine, oracle in ((0, 1), (2, 3)):
        for which in (merged, adapter):
            for (tokens, logprobs), (expected, expected_logprobs) in zip(
                which["responses"][engine], merged["responses"][oracle], strict=True
            ):
                assert tokens == expected
                np.testing.assert_allclose(logprobs, expected_logprobs, rtol=0, atol=LIMIT)
    assert merged["responses"][0] != merged["responses"][2], "the second adapter changed nothing"
    for which in (merged, adapter):
        assert len(set(which["digests"])) == 2
        assert which["faults"]["none"] == ""
    assert "q_proj" in merged["faults"]["another A"]
    assert "v_proj" in merged["faults"]["another B"]
    assert "tensors differ" in merged["faults"]["no adapter"]
    assert "q_proj.lora_A.weight" in adapter["faults"]["another A"]
    assert "q_proj.lora_B.weight" in adapter["faults"]["another B"]
    assert "down_proj.lora_B.weight" in adapter["faults"]["no adapter"]
    assert (merged["slots"], adapter["slots"] > 4 * 2 * 7) == (0, True)
