"""The load-balancing loss of experts in training: the same at every layout, and what its equation says in fp64.

Not covered: transformer-engine's layers, NCCL.
"""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megarlhf.config import SFTConfig
from megarlhf.models.role import build_role
from megarlhf.parallel.mesh import GroupCache
from megarlhf.runtime import Runtime
from megarlhf.trainers.supervised.loop import evaluate
from megarlhf.trainers.supervised.sft import SupervisedFineTuning
from tests.distributed import jobs
from tests.distributed.compare import assert_gradients_equal
from tests.distributed.test_packed_layouts import rl, write_ragged
from tests.distributed.tiny import write_family
from tests.refuses import missing_names

COEF, MINI_BATCH = 0.3, 6
PADDED, PACKED = {"micro_batch_samples": 2}, {"max_tokens_per_micro_batch": 120}
SEQUENCE = {"tp": 2, "sequence_parallel": True}

CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one process": (1, {}, PADDED),
    "micro-batches of one": (1, {}, {"micro_batch_samples": 1}),
    "tp2 sp": (2, SEQUENCE, PACKED),
    "ep2": (2, {"ep": 2}, PADDED),
    "pp2": (2, {"pp": 2}, PACKED),
    "pp2, computed again": (2, {"pp": 2}, PADDED | {"recompute": "full"}),
    "dp2": (2, {}, PACKED),
    "cp2 ep2": (2, {"cp": 2, "ep": 2}, PACKED),
    "tp2 sp pp2 vpp2": (4, SEQUENCE | {"pp": 2, "vpp": 2}, PACKED),
}


def config(model: Path, data: Path, parallel: dict[str, Any], train: dict[str, Any], **role: Any) -> dict[str, Any]:
    train = dict(train)
    role |= {"recompute": train.pop("recompute")} if "recompute" in train else {}
    return {
        "run": {"dir": "unused"},
        "actor": {"model": {"path": str(model)}, "parallel": parallel, "optim": {"lr": 1e-3}, **role},
        "data": {"train": str(data)},
        "train": {"num_steps": 1, "mini_batch_samples": MINI_BATCH, **train},
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Texts of very different lengths."""
    return write_ragged(tmp_path_factory.mktemp("ragged"), seed=7)["sft"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A mixture of experts whose config.json asks for the loss."""
    asked = {"output_router_logits": True, "router_aux_loss_coef": COEF}
    directory = tmp_path_factory.mktemp("experts")
    return write_family(directory, "qwen3_moe", max_position_embeddings=256, **asked)


def step(runtime: Runtime, configs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each configuration: the metrics of a first step, its gradients, the held-out loss before, and what was said of
    the balance."""
    found, cache, said = [], GroupCache(runtime), _Said()
    logger = logging.getLogger("megarlhf.models.role")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(said)
    try:
        for each in configs:
            cfg = SFTConfig.model_validate(each)
            objective, samples = SupervisedFineTuning(cfg), jobs._sft_samples(cfg)[:MINI_BATCH]
            actor = build_role("actor", cfg.actor, "lm", cache, seed=0, num_optimizer_steps=1)
            validation = evaluate(objective, actor, samples)["eval_loss"]
            gradients: list[jobs.Arrays] = []
            jobs.record_gradients(actor, gradients)
            metrics = jobs.train_once(objective, actor, samples)
            found.append(
                {"metrics": metrics, "gradients": gradients[0], "validation": validation, "said": said.lines.pop()}
            )
    finally:
        logger.removeHandler(said)
        logger.setLevel(level)
    return found


class _Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "load-balancing" in record.getMessage():
            self.lines.append(record.getMessage())


@pytest.fixture(scope="module")
def exact(model, data) -> dict[str, Any]:
    """Hugging Face's model in fp64, one sequence at a time; the balance from its router logits by the equation."""
    from transformers import AutoModelForCausalLM

    cfg = SFTConfig.model_validate(config(model, data, {}, PADDED))
    batch = jobs._sft_samples(cfg)[:MINI_BATCH]
    module = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    per_token, num_layers = module.config.num_experts_per_tok, module.config.num_hidden_layers
    denominator = sum(len(sample.tokens) - sample.prompt_length for sample in batch)
    loss, balance = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for sample in batch:
        tokens = torch.tensor([sample.tokens])
        out = module(tokens, output_router_logits=True)
        nll = torch.nn.functional.cross_entropy(out.logits[0, :-1], tokens[0, 1:], reduction="none")
        loss = loss + nll[sample.prompt_length - 1 :].sum() / denominator
        assert len(out.router_logits) == num_layers
        for logits_TE in out.router_logits:
            balance = balance + sequence_balance(logits_TE, per_token) / (num_layers * len(batch))
    (loss + COEF * balance).backward()
    gradients = {name: p.grad.numpy() for name, p in module.named_parameters() if p.grad is not None}
    return {"loss": loss.item(), "router_aux_loss": balance.item(), "gradients": gradients}


def sequence_balance(logits_TE: Tensor, per_token: int) -> Tensor:
    """DeepSeek-V3, equations 17 to 20, without its scaling by the number of experts a token."""
    tokens, experts = logits_TE.shape
    probabilities_TE = logits_TE.softmax(-1)
    best_TK = probabilities_TE.topk(per_token).indices.tolist()
    shares = [sum(expert in best for best in best_TK) / tokens for expert in range(experts)]
    return experts * sum(share * probabilities_TE[:, e].mean() for e, share in enumerate(shares))


@pytest.fixture(scope="module")
def alone(ranks, model, data) -> dict[str, Any]:
    return ranks.run(1, step, [config(model, data, {}, PADDED)])[0][0]


@pytest.mark.parametrize("case", CASES)
def test_every_layout_adds_the_equations_loss(case, ranks, model, data, exact, alone) -> None:
    """Loss, balance and gradients of a first step: fp64's within 1e-5, and each gradient is one process's. The
    evaluation before has no such loss in it."""
    world_size, parallel, train = CASES[case]
    by_rank = ranks.run(world_size, step, [config(model, data, parallel, train)])
    for (found,) in by_rank:
        for name in ("loss", "router_aux_loss"):
            np.testing.assert_allclose(found["metrics"][name], exact[name], rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(found["validation"], exact["loss"], rtol=1e-5)
    (found,) = by_rank[0]
    both = found["gradients"].keys() & exact["gradients"].keys()
    assert sum(name.endswith("mlp.gate.weight") for name in both) == 4
    assert len(both) > 25
    assert_gradients_equal(
        {name: found["gradients"][name] for name in both}, {name: exact["gradients"][name] for name in both}
    )
    used = {name for name, gradient in alone["gradients"].items() if gradient.any()}
    assert_gradients_equal(*({name: each["gradients"][name] for name in used} for each in (found, alone)))


def test_what_the_option_does(ranks, model, data, alone, tmp_path) -> None:
    """0 is the same model whose config.json asks for nothing; a number is config.json's; the loss changes a router's
    gradient, and with it what lies below. What was done is said."""
    silent = write_family(tmp_path / "silent", "qwen3_moe", max_position_embeddings=256)
    asked = [(model, {}), (model, {"router_aux_loss_coef": 0}), (silent, {"router_aux_loss_coef": COEF}), (silent, {})]
    configs = [config(path, data, {}, PADDED, **role) for path, role in asked]
    auto, off, number, unasked = ranks.run(1, step, configs)[0]
    for first, second in ((auto, number), (off, unasked)):
        assert first["metrics"] == second["metrics"]
        for name, gradient in first["gradients"].items():
            np.testing.assert_array_equal(gradient, second["gradients"][name])
    assert "router_aux_loss" not in off["metrics"]
    assert auto["metrics"]["loss"] == off["metrics"]["loss"]
    router = "model.layers.3.mlp.gate.weight"
    with_it, without = auto["gradients"][router], off["gradients"][router]
    assert np.linalg.norm(with_it - without) > np.linalg.norm(without)
    for found, coefficient, source in (
        (auto, "0.3 (config.json", "output_router_logits: true"), (off, "0 (router_aux_loss_coef)", ""),
        (number, "0.3 (router_aux_loss_coef)", ""), (unasked, "0 (config.json", "output_router_logits: false"),
    ):  # fmt: skip
        assert not missing_names(found["said"], f"coefficient {coefficient}", source)


def test_actor_and_critic_of_a_step_of_rl(ranks, model, tmp_path) -> None:
    """The actor's is config.json's; a critic, which has a scalar head, gets it by a number only. Metrics and gradients
    show it."""
    data = write_ragged(tmp_path, seed=7)["prompts"]
    found = {}
    for name, coefficients in {"auto": {}, "critic": {"actor": 0.0, "critic": 0.2}}.items():
        cfg = rl({"plain": model, "other": model}, data, {}, {"max_tokens_per_micro_batch": 120})
        for role, coefficient in coefficients.items():
            cfg[role] = cfg[role] | {"router_aux_loss_coef": coefficient}
        found[name] = ranks.run(1, "rl_step", cfg)[0]
    names = {name: {key for key in each["metrics"] if "router" in key} for name, each in found.items()}
    assert names == {"auto": {"actor_router_aux_loss"}, "critic": {"critic_router_aux_loss"}}
    assert 2.0 < found["auto"]["metrics"]["actor_router_aux_loss"] < 4.0, "two experts of four a token"
    router = "model.layers.0.mlp.gate.weight"
    first = {name: {role: found[name]["gradients"][role][0][router] for role in ("actor", "critic")} for name in found}
    for role in ("actor", "critic"):
        assert np.linalg.norm(first["auto"][role] - first["critic"][role]) > 1e-3
