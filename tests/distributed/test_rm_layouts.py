"""The reward model's first steps, both losses, against Hugging Face's sequence classifier and where pairs and
evaluations are cut over ranks. All layouts: tests/distributed/test_invariance.py."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarlhf.data.samples.encoders import PairSample
from tests.distributed.compare import assert_gradients_equal, assert_weights_equal
from tests.distributed.samples import pair_samples
from tests.distributed.tiny import write_reward_model

LR, STEPS, MINI_BATCH = 3e-4, 2, 8
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp1": (1, {}),
    "dp2": (2, {}),
    "tp2_sequence_parallel": (2, {"tp": 2, "sequence_parallel": True}),
}


@pytest.fixture(scope="session")
def classifier(two_layers, tmp_path_factory) -> Path:
    return write_reward_model(tmp_path_factory.mktemp("classifier"), two_layers["plain"], seed=7, std=0.2)


def config(model: Path, data: Path, parallel: dict[str, Any], loss: str) -> dict[str, Any]:
    return {
        "run": {"dir": "unused"},
        "reward_model": {"model": {"path": str(model)}, "parallel": parallel, "optim": {"lr": LR}},
        "data": {"train": str(data)},
        "train": {"num_steps": STEPS, "mini_batch_samples": MINI_BATCH, "micro_batch_samples": 2},
        "loss": loss,
    }


def _loss_by_hand(model: Any, pair: PairSample, kind: str) -> torch.Tensor:
    """One pair, unpadded: the two losses as the papers state them."""

    def scores(response: list[int]) -> torch.Tensor:
        hidden = model.model(torch.tensor([pair.prompt_tokens + response])).last_hidden_state
        return model.score(hidden)[0, :, 0]

    chosen, rejected = scores(pair.chosen_tokens), scores(pair.rejected_tokens)
    if kind == "last_token":
        return -torch.nn.functional.logsigmoid(chosen[-1] - rejected[-1])
    longest = max(len(chosen), len(rejected))
    prompt = len(pair.prompt_tokens)
    first = next(n for n in range(longest - prompt) if pair.chosen_tokens[n : n + 1] != pair.rejected_tokens[n : n + 1])
    margins = [
        chosen[min(n, len(chosen) - 1)] - rejected[min(n, len(rejected) - 1)] for n in range(prompt + first, longest)
    ]
    return -torch.nn.functional.logsigmoid(torch.stack(margins)).mean()


@pytest.fixture(scope="session", params=["last_token", "aligned_span"])
def expected(request, classifier, data) -> dict[str, Any]:
    from transformers import LlamaForSequenceClassification

    pairs = pair_samples(data["pairs"], classifier)
    model = LlamaForSequenceClassification.from_pretrained(classifier, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    trace: dict[str, Any] = {"kind": request.param, "loss": [], "grad_norm": [], "gradients": []}
    with torch.no_grad():
        trace["eval_loss"] = np.mean([_loss_by_hand(model, pair, request.param).item() for pair in pairs[:33]])
    for step in range(STEPS):
        optimizer.zero_grad()
        batch = pairs[step * MINI_BATCH : (step + 1) * MINI_BATCH]
        loss = torch.stack([_loss_by_hand(model, pair, request.param) for pair in batch]).mean()
        loss.backward()
        trace["loss"].append(loss.item())
        trace["gradients"].append({n: p.grad.numpy().copy() for n, p in model.named_parameters() if p.grad is not None})
        trace["grad_norm"].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
    trace["weights"] = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    return trace


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_losses_equal_hugging_face_at_every_layout(layout, expected, classifier, ranks, data) -> None:
    """Losses, gradient norms, each gradient of the first step, weights; evaluation over an odd number of pairs."""
    world_size, parallel = LAYOUTS[layout]
    cfg = config(classifier, data["pairs"], parallel, expected["kind"])
    actual = ranks.run(world_size, "rm_steps", cfg, STEPS)[0]
    np.testing.assert_allclose(actual["evaluation"]["eval_loss"], expected["eval_loss"], rtol=1e-5)
    np.testing.assert_allclose(actual["loss"], expected["loss"], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(actual["grad_norm"], expected["grad_norm"], rtol=1e-5)
    assert_gradients_equal(actual["gradients"][0], expected["gradients"][0])
    assert_weights_equal(actual["weights"], expected["weights"])
    deviation, ranked, again, twice = actual["scaling"]
    assert deviation != pytest.approx(1.0, abs=1e-3)
    assert twice == pytest.approx(1.0, rel=1e-5), "the scores have unit variance now"
    assert again["eval_pair_accuracy"] == ranked["eval_pair_accuracy"]
    assert again["eval_chosen_score"] == pytest.approx(ranked["eval_chosen_score"] / deviation, rel=1e-5)
