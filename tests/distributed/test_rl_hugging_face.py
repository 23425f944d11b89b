"""One PPO step against plain Hugging Face two_layers, one sequence at a time, by the papers' equations.

The other RL tests compare layouts with each other; this one says that what they agree on is right: which position a
value, a score and a log-prob stand at, the KL in the reward, GAE, whitening, both clips, every gradient.
"""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarlhf.data.tokenizers.tokenizer import load_tokenizer
from tests.distributed.compare import assert_gradients_equal
from tests.distributed.test_rl_layouts import config
from tests.distributed.tiny import write_reward_model

GAMMA, LAM, TEMPERATURE, KL, VALUE_CLIP, CLIP, ENTROPY = 0.97, 0.9, 0.9, 0.1, 0.05, 0.2, 0.01
PER_PROMPT = 4


@pytest.fixture(scope="module")
def scorer(two_layers, tmp_path_factory) -> Path:
    """A reward model with scores that differ from response to response."""
    return write_reward_model(tmp_path_factory.mktemp("scorer"), two_layers["other"], std=0.3)


def _logprobs(model: Any, prompt: list[int], response: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
    every = logits.log_softmax(-1)
    return every.gather(1, torch.tensor(response)[:, None])[:, 0], -(every.exp() * every).sum(-1)


def _scores(model: Any, prompt: list[int], response: list[int]) -> torch.Tensor:
    return model.score(model.model(torch.tensor([prompt + response])).last_hidden_state)[0, :, 0]


def _advantages(reward: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    advantages = torch.zeros_like(values)
    running = torch.tensor(0.0)
    for t in reversed(range(len(values))):
        following = values[t + 1] if t + 1 < len(values) else torch.tensor(0.0)
        running = reward[t] + GAMMA * following - values[t] + GAMMA * LAM * running
        advantages[t] = running
    return advantages


Columns = list[torch.Tensor]


def _losses(
    actor: Any, critic: Any, pairs: list[Any], old: Columns, advantages: Columns, values: Columns, returns: Columns
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Policy loss, entropy and value loss, each over the response tokens of the mini-batch."""
    num_tokens = sum(len(response) for _, response in pairs)
    policy, entropy, value_loss = torch.tensor(0.0), torch.tensor(0.0), torch.tensor(0.0)
    for pair, o, a, v, target in zip(pairs, old, advantages, values, returns, strict=True):
        logprobs, entropies = _logprobs(actor, *pair)
        ratio = (logprobs - o).exp()
        policy = policy - torch.minimum(ratio * a, ratio.clamp(1 - CLIP, 1 + CLIP) * a).sum() / num_tokens
        entropy = entropy + entropies.sum() / num_tokens
        new = _scores(critic, *pair)[len(pair[0]) - 1 : -1]
        clipped = v + (new - v).clamp(-VALUE_CLIP, VALUE_CLIP)
        value_loss = value_loss + 0.5 * torch.maximum((new - target) ** 2, (clipped - target) ** 2).sum() / num_tokens
    return policy, entropy, value_loss


def test_a_ppo_step_equals_the_equations(ranks, two_layers, scorer, data) -> None:
    """Responses of up to four tokens, ended and truncated ones; a reference of other weights. One mini-batch."""
    from transformers import LlamaForCausalLM, LlamaForSequenceClassification

    cfg = config({**two_layers, "other": scorer}, data["prompts"], {}, value_clip=VALUE_CLIP, gamma=GAMMA, lam=LAM)
    cfg["reference"]["model"]["path"] = str(two_layers["tied"])
    cfg["train"] |= {"epochs_per_step": 1, "mini_batch_samples": 16}
    cfg["rollout"]["max_response_tokens"] = 4
    step = ranks.run(2, "rl_step", cfg)[0]
    responses = step["responses"]
    assert len({len(response) for response in responses}) > 1, "all responses have one length"
    assert any(response[-1] != 2 for response in responses), "no response was truncated"

    tokenizer = load_tokenizer(two_layers["plain"])
    rows = [json.loads(line) for line in data["prompts"].read_text().splitlines()][: len(responses) // PER_PROMPT]
    prompts = [[1, *tokenizer.encode(rows[n // PER_PROMPT]["prompt"])] for n in range(len(responses))]
    actor = LlamaForCausalLM.from_pretrained(two_layers["plain"], dtype=torch.float32)
    reference = LlamaForCausalLM.from_pretrained(two_layers["tied"], dtype=torch.float32)
    reward_model = LlamaForSequenceClassification.from_pretrained(scorer, dtype=torch.float32)
    critic = copy.deepcopy(reward_model)
    pairs = list(zip(prompts, responses, strict=True))
    with torch.no_grad():
        old = [_logprobs(actor, *pair)[0] for pair in pairs]
        ref = [_logprobs(reference, *pair)[0] for pair in pairs]
        values = [_scores(critic, p, r)[len(p) - 1 : -1] for p, r in pairs]
        scores = torch.stack([_scores(reward_model, *pair)[-1] for pair in pairs])
    right = [tokenizer.decode(r, continuation=True) == rows[n // PER_PROMPT]["answer"] for n, r in enumerate(responses)]
    rewards = scores - 0.5 + 2.0 * torch.tensor(right).float()
    advantages, returns = [], []
    for o, f, v, reward in zip(old, ref, values, rewards, strict=True):
        shaped = -KL * (o - f)
        shaped[-1] += reward
        advantages.append(_advantages(shaped, v))
        returns.append(advantages[-1] + v)
    every = torch.cat(advantages)
    advantages = [(a - every.mean()) / (every.var(unbiased=False) + 1e-8).sqrt() for a in advantages]

    np.testing.assert_allclose(step["rewards"], rewards, atol=2e-5)
    expected = {"old_logprobs": old, "ref_logprobs": ref, "values": values}
    for name, column in (expected | {"advantages": advantages, "returns": returns}).items():
        np.testing.assert_allclose(step["columns"][name], torch.cat(column), atol=2e-5, err_msg=name)

    policy, entropy, value_loss = _losses(actor, critic, pairs, old, advantages, values, returns)
    (policy - ENTROPY * entropy).backward()
    value_loss.backward()
    metrics = step["metrics"]
    np.testing.assert_allclose(metrics["entropy"], entropy.item(), rtol=1e-5)
    np.testing.assert_allclose(metrics["value_loss"], value_loss.item(), rtol=1e-5)
    np.testing.assert_allclose(metrics["policy_loss"], policy.item(), atol=1e-6)  # near zero: the ratio is one
    for name, model in (("actor", actor), ("critic", critic)):
        gradients = {n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}
        assert_gradients_equal(step["gradients"][name][0], gradients, what=name)


@pytest.mark.parametrize(
    ("parallel", "train"), [({}, {}), ({"tp": 2}, {"max_tokens_per_micro_batch": 64}), ({"pp": 2}, {})]
)
def test_a_reward_model_that_scores_by_the_mean_over_the_response(
    ranks, two_layers, scorer, data, tmp_path, parallel, train
) -> None:
    """As its config.json says; the reward of each sample by Hugging Face's numbers of the response's tokens."""
    from transformers import LlamaForSequenceClassification

    by_mean = shutil.copytree(scorer, tmp_path / "mean")
    stated = json.loads((by_mean / "config.json").read_text())
    (by_mean / "config.json").write_text(json.dumps({**stated, "megarlhf_score_of": "response_mean"}))
    cfg = config({**two_layers, "other": by_mean}, data["prompts"], parallel)
    cfg["critic"]["model"]["path"] = str(scorer)
    cfg["rollout"]["max_response_tokens"] = 4
    if train:
        cfg["train"] = {key: value for key, value in cfg["train"].items() if key != "micro_batch_samples"} | train
    step = ranks.run(2, "rl_step", cfg)[0]
    tokenizer = load_tokenizer(two_layers["plain"])
    rows = [json.loads(line) for line in data["prompts"].read_text().splitlines()]
    reward_model = LlamaForSequenceClassification.from_pretrained(scorer, dtype=torch.float32)
    for n, (response, reward) in enumerate(zip(step["responses"], step["rewards"], strict=True)):
        row = rows[n // PER_PROMPT]
        prompt = [1, *tokenizer.encode(row["prompt"])]
        with torch.no_grad():
            score = float(_scores(reward_model, prompt, response)[len(prompt) :].mean())
        right = tokenizer.decode(response, continuation=True) == row["answer"]
        assert reward == pytest.approx(score - 0.5 + 2.0 * right, abs=2e-5)
