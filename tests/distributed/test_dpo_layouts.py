"""The first steps of `megarlhf dpo`, every loss, against Hugging Face's models and the papers' formulas, at every
layout and with other micro-batches.

Reference and actor are different models, in some cases at different layouts. Not covered: bf16; the losses alone
(tests/algo/test_preference.py) and other projects' (tests/peers).
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megarlhf.config import DPOConfig
from megarlhf.data.samples.encoders import PairSample
from tests.distributed.compare import assert_gradients_equal, assert_weights_equal
from tests.distributed.dpo_jobs import dpo_steps, pairs_of

LR, STEPS, MINI_BATCH, HELDOUT = 3e-4, 2, 8, 33
PADDED, PACKED = {"micro_batch_samples": 2}, {"max_tokens_per_micro_batch": 70}
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any], dict[str, int]]] = {
    "tp1": (1, {}, {}, PADDED),
    "tp1_packed": (1, {}, {}, PACKED),
    "tp2_packed": (2, {"tp": 2}, {"tp": 2}, PACKED),
    "tp2_with_a_reference_of_two_stages": (2, {"tp": 2}, {"pp": 2}, {"micro_batch_samples": 8}),
    "pp2": (2, {"pp": 2}, {"pp": 2}, {"micro_batch_samples": 1}),
    "dp2_packed_with_a_reference_of_tp2": (2, {}, {"tp": 2}, PACKED),
    "tp2_sequence_parallel_with_a_reference_on_one_rank": (2, {"tp": 2}, {"ranks": [1, 2]}, {"micro_batch_samples": 4}),
}
LOSSES: dict[str, dict[str, Any]] = {
    "dpo": {"beta": 0.3},
    "smoothed dpo with likelihood": {"label_smoothing": 0.1, "sft_coef": 0.5},
    "ipo": {"loss": "ipo", "beta": 0.2},
    "ipo of means": {"loss": "ipo", "beta": 0.2, "ipo_length_normalised": True},
    "simpo": {"loss": "simpo", "simpo_margin": 0.3},
    "orpo": {"loss": "orpo", "sft_average": "token"},
    "kto": {"loss": "kto", "beta": 0.5, "kto_undesirable_weight": 1.5},
}


def config(models: dict[str, Path], data: Path, actor: Any, reference: Any, micro: dict[str, int]) -> dict[str, Any]:
    return {
        "run": {"dir": "unused"},
        "actor": {"model": {"path": str(models["plain"])}, "parallel": actor, "optim": {"lr": LR}},
        "data": {"train": str(data)},
        "train": {"num_steps": STEPS, "mini_batch_samples": MINI_BATCH, **micro},
        "reference": {"model": {"path": str(models["other"])}, "parallel": reference},
    }


def losses_for(tree: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Those without a reference are given none."""
    return {
        name: {**keys, "reference": None if keys.get("loss") in ("simpo", "orpo") else tree["reference"]}
        for name, keys in LOSSES.items()
    }


def logprob(model: Any, prompt: list[int], response: list[int]) -> Tensor:
    """Of a whole response, unpadded."""
    logits_TV = model(torch.tensor([prompt + response])).logits[0].double()
    labels = torch.tensor(response)[:, None]
    return torch.log_softmax(logits_TV[len(prompt) - 1 : -1], -1).gather(1, labels).sum()


class ByHand:
    """Formulas of the papers on Hugging Face's models."""

    def __init__(self, policy: Any, reference: Any, keys: dict[str, Any]) -> None:
        self.policy, self.reference, self.keys = policy, reference, keys

    def _ratio(self, prompt: list[int], response: list[int]) -> Tensor:
        with torch.no_grad():
            reference = logprob(self.reference, prompt, response)
        return logprob(self.policy, prompt, response) - reference

    def point(self, pairs: list[PairSample]) -> float:
        """max(0, mean over prompts of the log-ratios of the next pair's responses)."""
        others = [*pairs[1:], pairs[0]]
        with torch.no_grad():
            found = [
                self._ratio(pair.prompt_tokens, response).item()
                for pair, other in zip(pairs, others, strict=True)
                for response in (other.chosen_tokens, other.rejected_tokens)
            ]
        return max(0.0, sum(found) / len(found))

    def loss(self, pairs: list[PairSample]) -> Tensor:
        name = self.keys.get("loss", "dpo")
        point = self.point(pairs) if name == "kto" else 0.0
        total = torch.stack([self._of_pair(pair, name, point) for pair in pairs]).mean()
        coef = self.keys.get("sft_coef", 1.0 if name == "orpo" else 0.0)
        if not coef:
            return total
        chosen = [logprob(self.policy, pair.prompt_tokens, pair.chosen_tokens) for pair in pairs]
        lengths = [len(pair.chosen_tokens) for pair in pairs]
        if self.keys.get("sft_average") == "token":
            return total - coef * sum(chosen) / sum(lengths)
        return total - coef * sum(each / n for each, n in zip(chosen, lengths, strict=True)) / len(pairs)

    def _of_pair(self, pair: PairSample, name: str, point: float) -> Tensor:
        beta = self.keys.get("beta", 2.0 if name == "simpo" else 0.1)
        prompt, responses = pair.prompt_tokens, (pair.chosen_tokens, pair.rejected_tokens)
        if name in ("simpo", "orpo"):
            w, l = (logprob(self.policy, prompt, response) / len(response) for response in responses)  # noqa: E741
            if name == "simpo":
                return -logsigmoid(beta * w - beta * l - self.keys["simpo_margin"])
            odds = [each.exp() / (1 - each.exp()) for each in (w, l)]
            return -beta * logsigmoid(torch.log(odds[0] / odds[1]))
        w, l = (self._ratio(prompt, response) for response in responses)  # noqa: E741
        if name == "kto":
            gain, lost = torch.sigmoid(beta * (w - point)), torch.sigmoid(beta * (point - l))
            return 0.5 * ((1 - gain) + self.keys["kto_undesirable_weight"] * (1 - lost))
        if name == "ipo":
            if self.keys.get("ipo_length_normalised"):
                w, l = w / len(responses[0]), l / len(responses[1])  # noqa: E741
            return (w - l - 1 / (2 * beta)) ** 2
        smoothing = self.keys.get("label_smoothing", 0.0)
        return -(1 - smoothing) * logsigmoid(beta * (w - l)) - smoothing * logsigmoid(-beta * (w - l))


@pytest.fixture(scope="module")
def expected(two_layers, data) -> dict[str, Any]:
    from transformers import LlamaForCausalLM

    cfg = DPOConfig.model_validate(config(two_layers, data["pairs"], {}, {}, PADDED))
    pairs, traces = pairs_of(cfg), {}
    reference = LlamaForCausalLM.from_pretrained(two_layers["other"], dtype=torch.float32)
    for name, keys in LOSSES.items():
        model = LlamaForCausalLM.from_pretrained(two_layers["plain"], dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
        by_hand = ByHand(model, reference, keys)
        trace: dict[str, Any] = {"loss": [], "grad_norm": [], "gradients": [], "point": []}
        with torch.no_grad():
            trace["eval_loss"] = by_hand.loss(pairs[:HELDOUT]).item()
            trace["eval_point"] = by_hand.point(pairs[:HELDOUT])
        for step in range(STEPS):
            optimizer.zero_grad()
            batch = pairs[step * MINI_BATCH : (step + 1) * MINI_BATCH]
            trace["point"].append(by_hand.point(batch))
            loss = by_hand.loss(batch)
            loss.backward()
            trace["loss"].append(loss.item())
            trace["gradients"].append({n: p.grad.numpy().copy() for n, p in model.named_parameters()})
            trace["grad_norm"].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
        trace["weights"] = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
        traces[name] = trace
    return traces


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_loss_equals_hugging_face_at_every_layout(layout, expected, ranks, two_layers, data) -> None:
    """Losses, gradient norms, each gradient of the first step, weights; KTO's reference point; evaluation over an odd
    number of pairs."""
    world_size, *how = LAYOUTS[layout]
    tree = config(two_layers, data["pairs"], *how)
    found = ranks.run(world_size, dpo_steps, tree, losses_for(tree), STEPS, HELDOUT)
    for name, keys in LOSSES.items():
        actual, wanted = found[0][name], expected[name]
        has_reference = keys.get("loss") not in ("simpo", "orpo")
        assert actual["frozen"] == [("reference", None)] * has_reference
        np.testing.assert_allclose(actual["evaluation"]["eval_loss"], wanted["eval_loss"], rtol=1e-5, err_msg=name)
        for metric in ("loss", "grad_norm"):
            values = [step[metric] for step in actual["steps"]]
            np.testing.assert_allclose(values, wanted[metric], rtol=1e-5, err_msg=f"{name}: {metric}")
        assert_gradients_equal(actual["gradients"][0], wanted["gradients"][0], what=name)
        assert_weights_equal(actual["weights"], wanted["weights"], what=name)
        assert ("kl_point" in actual["steps"][0]) == (name == "kto")
    point = [step["kl_point"] for step in found[0]["kto"]["steps"]]
    np.testing.assert_allclose(point, expected["kto"]["point"], rtol=1e-5, atol=1e-6)
    eval_point = found[0]["kto"]["evaluation"]["eval_kl_point"]
    assert eval_point == pytest.approx(expected["kto"]["eval_point"], rel=1e-5)
    assert eval_point > 0.1, "the point is measured, not held at zero"


def test_metrics_agree_with_each_other(ranks, two_layers, data) -> None:
    """Margins are differences; with a reference equal to the actor all rewards are 0 and the loss is ln 2."""
    tree = config(two_layers, data["pairs"], {"tp": 2}, {"tp": 2}, PACKED)
    losses = {"other": {}, "same": {"reference": None}}
    found = ranks.run(2, dpo_steps, tree, losses, 1, 8)[0]
    other, same = (found[name]["evaluation"] for name in losses)
    for metrics in (other, same):
        margin = metrics["eval_chosen_reward"] - metrics["eval_rejected_reward"]
        assert metrics["eval_reward_margin"] == pytest.approx(margin, abs=1e-9)
        assert metrics["eval_chosen_logprob"] == pytest.approx(same["eval_chosen_logprob"])
    assert abs(other["eval_chosen_reward"]) > 1e-3
    assert same["eval_chosen_reward"] == pytest.approx(0.0, abs=1e-6)
    assert same["eval_loss"] == pytest.approx(math.log(2), rel=1e-6)


@pytest.mark.parametrize("micro", [{"micro_batch_samples": 1}, PACKED])
def test_a_rank_without_a_pair(micro, ranks, two_layers, data) -> None:
    """One pair a step on two data-parallel ranks: one of them runs over fillers and adds nothing."""
    losses, found = {name: LOSSES[name] for name in ("dpo", "smoothed dpo with likelihood", "ipo of means")}, []
    for world_size, how in ((1, PADDED), (2, micro)):
        tree = config(two_layers, data["pairs"], {}, {}, how)
        tree["train"]["mini_batch_samples"] = 1
        found.append(ranks.run(world_size, dpo_steps, tree, losses, 1, 1)[0])
    for name in losses:
        expected, actual = (each[name] for each in found)
        for metric in ("loss", "grad_norm", "chosen_logprob", "reward_margin"):
            assert actual["steps"][0][metric] == pytest.approx(expected["steps"][0][metric], rel=1e-5, abs=1e-6), metric
        assert actual["evaluation"] == pytest.approx(expected["evaluation"], rel=1e-5, abs=1e-6)
        assert_gradients_equal(actual["gradients"][0], expected["gradients"][0], what=name)
