"""Their side of the comparison: published functions of verl, OpenRLHF and TRL, called on the same inputs.

Runs where `make test-peers` has installed them. What stands in for packages that need a GPU is in `importable`; none of
the functions called here reaches it. A method is called on a stand-in for its object, which has the settings that the
method reads.
"""

from __future__ import annotations

import importlib
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor

from tests.peers import pairs
from tests.peers.inputs import GROUP, Inputs, N
from tests.peers.ours import CONSTANT

ABSENT = ("flash_attn", "deepspeed", "ring_flash_attn")
"""Packages that OpenRLHF imports at the top and that need a GPU to be built."""


class _Absent(ModuleType):
    """Has every attribute; calling one does nothing."""

    def __getattr__(self, name: str) -> Any:
        return MagicMock(name=name)


class _AbsentFinder(MetaPathFinder, Loader):
    """Finds modules of packages that are not there."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] in ABSENT else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def importable(name: str) -> Any:
    """The module of this name."""
    if name.startswith("openrlhf") and not any(isinstance(finder, _AbsentFinder) for finder in sys.meta_path):
        sys.meta_path.append(_AbsentFinder())
    return importlib.import_module(name)


def _verl() -> Any:
    return importable("verl.trainer.ppo.core_algos")


def _gradient(inputs: Inputs, loss_of: Callable[[Tensor], Tensor], grid_NT: Tensor) -> list[float]:
    """The loss and its gradient at each response token."""
    grid_NT = grid_NT.clone().requires_grad_()
    loss = loss_of(grid_NT)
    (gradient_NT,) = torch.autograd.grad(loss, grid_NT)
    return [float(loss), *inputs.tokens(gradient_NT).tolist()]


# --- verl ---------------------------------------------------------------------------------------------------------


def verl_gae(inputs: Inputs) -> list[float]:
    """`compute_gae_advantage_return`; verl's rewards hold the KL already, here none."""
    found = _verl().compute_gae_advantage_return(
        inputs.rewards_at_the_end(), inputs.values_NT, inputs.mask_NT, gamma=0.9, lam=0.8
    )
    return [number for grid_NT in found for number in inputs.tokens(grid_NT).tolist()]


def verl_outcome(inputs: Inputs, *, function: str, **options: Any) -> list[float]:
    """`compute_*_outcome_advantage` in groups of five, four, two and one."""
    index = inputs.other_groups_N.numpy()
    found, _ = getattr(_verl(), function)(inputs.rewards_at_the_end(), inputs.mask_NT, index=index, **options)
    return inputs.tokens(found).tolist()


def verl_reinforce(inputs: Inputs) -> list[float]:
    found, _ = _verl().compute_reinforce_plus_plus_outcome_advantage(
        inputs.rewards_at_the_end(), inputs.mask_NT, config=SimpleNamespace(gamma=0.9)
    )
    return inputs.tokens(found).tolist()


def verl_remax(inputs: Inputs) -> list[float]:
    found, _ = _verl().compute_remax_outcome_advantage(inputs.rewards_at_the_end(), inputs.greedy_N, inputs.mask_NT)
    return inputs.tokens(found).tolist()


def verl_policy(
    inputs: Inputs, *, name: str, average: str = "token-mean", correct: bool = False, per_response: bool = False
) -> list[float]:
    """A registered policy loss with clip .2 and .3 and its default dual clip of 3."""
    config = importable("verl.workers.config").ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=0.2,
        clip_ratio_high=0.3,
    )
    config.global_batch_info.update({"loss_scale_factor": CONSTANT})
    weights_NT = None
    if correct:
        log_ratio_NT = inputs.old_logprobs_NT - inputs.rollout_logprobs_NT
        helper = importable("verl.trainer.ppo.rollout_corr_helper")
        weights_NT, _ = helper.compute_rollout_correction_weights(log_ratio_NT, inputs.mask_NT, "token", 1.5)
    advantages_NT = inputs.advantages_N[:, None] * inputs.mask_NT if per_response else inputs.advantages_NT

    def loss_of(logprobs_NT: Tensor) -> Tensor:
        return _verl().get_policy_loss_fn(name)(
            old_log_prob=inputs.old_logprobs_NT,
            log_prob=logprobs_NT,
            advantages=advantages_NT,
            response_mask=inputs.mask_NT,
            loss_agg_mode=average,
            config=config,
            rollout_is_weights=weights_NT,
        )[0]

    return _gradient(inputs, loss_of, inputs.logprobs_NT)


def verl_value(inputs: Inputs) -> list[float]:
    def loss_of(values_NT: Tensor) -> Tensor:
        return _verl().compute_value_loss(
            vpreds=values_NT,
            returns=inputs.returns_NT,
            values=inputs.old_values_NT,
            response_mask=inputs.mask_NT,
            cliprange_value=0.2,
        )[0]

    return _gradient(inputs, loss_of, inputs.values_NT)


def verl_kl(inputs: Inputs, *, kind: str) -> list[float]:
    return inputs.tokens(_verl().kl_penalty(inputs.logprobs_NT, inputs.ref_logprobs_NT, kind)).tolist()


def verl_correction(inputs: Inputs, *, level: str, threshold: Any) -> list[float]:
    helper = importable("verl.trainer.ppo.rollout_corr_helper")
    log_ratio_NT = inputs.old_logprobs_NT - inputs.rollout_logprobs_NT
    weights_NT, _ = helper.compute_rollout_correction_weights(log_ratio_NT, inputs.mask_NT, level, threshold)
    return inputs.tokens(weights_NT).tolist()


def _adaptive(make: Callable[[], Any], inputs: Inputs) -> list[float]:
    made, coefs = make(), []
    for measured in inputs.rewards_N.abs().tolist()[:5]:
        made.update(measured, 12)
        coefs.append(float(made.value))
    return coefs


def verl_adaptive(inputs: Inputs) -> list[float]:
    return _adaptive(lambda: _verl().AdaptiveKLController(0.1, 0.5, 100), inputs)


def verl_gdpo(inputs: Inputs) -> list[float]:
    """`compute_gdpo_outcome_advantage` of two rewards, weighted 1 and .5."""
    found, _ = _verl().compute_gdpo_outcome_advantage(
        inputs.rewards_at_the_end(),
        inputs.mask_NT,
        index=inputs.groups_N.numpy(),
        config={"gdpo_reward_keys": ["first", "second"], "gdpo_reward_weights": [1.0, 0.5]},
        non_tensor_batch={"first": inputs.eighths_N.numpy(), "second": inputs.greedy_N.numpy()},
        batch={"prompts": inputs.mask_NT[:, :0], "attention_mask": inputs.mask_NT.long()},
    )
    return inputs.tokens(found).tolist()


def verl_overlong(inputs: Inputs) -> list[float]:
    """`DAPORewardManager`, a buffer of 4 of 7 tokens."""
    manager = importable("verl.workers.reward_manager.dapo").DAPORewardManager
    scores = iter(inputs.rewards_N.tolist())
    made = manager(
        tokenizer=MagicMock(eos_token="", decode=lambda *arguments, **options: ""),
        num_examine=0,
        compute_score=lambda **options: next(scores),
        max_resp_len=7,
        overlong_buffer_cfg=SimpleNamespace(enable=True, len=4, penalty_factor=2.0, log=False),
    )
    prompts = torch.ones(N, 1, dtype=torch.int64)
    batch = {
        "prompts": prompts,
        "responses": torch.zeros_like(inputs.mask_NT, dtype=torch.int64),
        "attention_mask": torch.cat([prompts, inputs.mask_NT.long()], 1),
    }
    columns = {"reward_model": [{"ground_truth": ""}] * N, "data_source": [""] * N}
    data = importable("verl").DataProto.from_dict(tensors=batch, non_tensors=columns)
    return made(data).sum(1).tolist()


# --- OpenRLHF -----------------------------------------------------------------------------------------------------


def openrlhf_advantages(inputs: Inputs, *, estimator: str, kl_coef: float = 0.0, gamma: float = 1.0) -> list[float]:
    """`RemoteExperienceMaker.compute_advantages_and_returns`, all responses in one experience."""
    maker = importable("openrlhf.trainer.ppo_utils.experience_maker").RemoteExperienceMaker
    advantage = SimpleNamespace(estimator=estimator, gamma=gamma, lambd=0.8, no_std_norm=False)
    reward = SimpleNamespace(clip_range=None, overlong_buffer_len=None, stop_properly_penalty_coef=None)
    args = SimpleNamespace(
        algo=SimpleNamespace(advantage=advantage), reward=reward, rollout=SimpleNamespace(n_samples_per_prompt=GROUP)
    )
    fake = SimpleNamespace(
        strategy=SimpleNamespace(args=args), kl_ctl=SimpleNamespace(value=kl_coef), advantage_estimator=estimator
    )
    for name in ("get_advantages_and_returns", "get_cumulative_returns"):
        setattr(fake, name, partial(getattr(maker, name), fake))
    experience = SimpleNamespace(
        index=list(range(N)),
        rewards=inputs.rewards_N.clone(),
        kl=(inputs.old_logprobs_NT - inputs.ref_logprobs_NT) * inputs.mask_NT,
        action_mask=inputs.mask_NT,
        values=inputs.values_NT,
        info={},
    )
    maker.compute_advantages_and_returns(fake, [experience])
    grids = (experience.advantages, experience.returns) if estimator == "gae" else (experience.advantages,)
    return [number for grid_NT in grids for number in inputs.tokens(grid_NT).tolist()]


def openrlhf_policy(
    inputs: Inputs, *, correct: bool = False, per_response: bool = False, **options: Any
) -> list[float]:
    """`PolicyLoss` with clip .2 and .3."""
    loss = importable("openrlhf.models.loss").PolicyLoss(clip_eps_low=0.2, clip_eps_high=0.3, **options)
    advantages_NT = inputs.advantages_N[:, None] * inputs.mask_NT if per_response else inputs.advantages_NT
    rollout_NT = inputs.rollout_logprobs_NT if correct else None

    def loss_of(logprobs_NT: Tensor) -> Tensor:
        return loss(logprobs_NT, inputs.old_logprobs_NT, advantages_NT, inputs.mask_NT, rollout_NT)[0]

    return _gradient(inputs, loss_of, inputs.logprobs_NT)


def openrlhf_overlong(inputs: Inputs) -> list[float]:
    """`apply_overlong_penalty`, a buffer of 4 of 7 tokens."""
    experience = SimpleNamespace(rewards=inputs.rewards_N.clone(), response_length=inputs.lengths_N)
    importable("openrlhf.trainer.ppo_utils.length_penalty").apply_overlong_penalty(
        [experience], max_new_tokens=7, overlong_buffer_len=4, overlong_penalty_factor=2.0
    )
    return experience.rewards.tolist()


def openrlhf_value(inputs: Inputs, *, clip: float | None) -> list[float]:
    loss = importable("openrlhf.models.loss").ValueLoss(clip)
    return _gradient(
        inputs,
        lambda values_NT: loss(values_NT, inputs.old_values_NT, inputs.returns_NT, inputs.mask_NT),
        inputs.values_NT,
    )


def openrlhf_kl(inputs: Inputs, *, kind: str) -> list[float]:
    """`compute_approx_kl`; it computes in fp32."""
    estimate = importable("openrlhf.models.utils").compute_approx_kl
    return inputs.tokens(estimate(inputs.logprobs_NT, inputs.ref_logprobs_NT, kl_estimator=kind)).tolist()


def openrlhf_adaptive(inputs: Inputs) -> list[float]:
    controller = importable("openrlhf.trainer.ppo_utils.kl_controller").AdaptiveKLController
    return _adaptive(lambda: controller(0.1, 0.5, 100), inputs)


# --- TRL ----------------------------------------------------------------------------------------------------------


def trl_policy(inputs: Inputs, *, forwards: int = 1, **options: Any) -> list[float]:
    """`GRPOTrainer._compute_loss` on a stand-in, in one forward or several whose gradients are accumulated."""
    parts = torch.arange(N).split(N // forwards)

    def loss_of(logprobs_NT: Tensor) -> Tensor:
        return torch.stack([_trl_loss(inputs, logprobs_NT, part, forwards, **options) for part in parts]).sum()

    return _gradient(inputs, loss_of, inputs.logprobs_NT)


def _trl_loss(
    inputs: Inputs,
    logprobs_NT: Tensor,
    part: Tensor,
    forwards: int,
    *,
    loss_type: str,
    level: str = "token",
    delta: float | None = None,
    high: float = 0.3,
    correct: bool = False,
) -> Tensor:
    trainer = importable("trl.trainer.grpo_trainer").GRPOTrainer
    settings = SimpleNamespace(
        delta=delta,
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        use_bias_correction_kl=False,
        steps_per_generation=forwards,
    )
    fake = MagicMock()
    fake.configure_mock(
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        beta=0.0,
        args=settings,
        loss_type=loss_type,
        epsilon_low=0.2,
        epsilon_high=high,
        use_vllm=correct,
        vllm_importance_sampling_correction=correct,
        current_gradient_accumulation_steps=forwards,
        max_completion_length=CONSTANT,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    fake.model.training = True
    fake.accelerator.num_processes = 1
    fake.accelerator.gather = lambda x: x
    fake._get_per_token_logps_and_entropies.return_value = (
        logprobs_NT[part],
        torch.zeros_like(logprobs_NT[part]),
        None,
    )
    log_ratio_NT = inputs.old_logprobs_NT - inputs.rollout_logprobs_NT
    ids = torch.zeros_like(inputs.mask_NT[part], dtype=torch.int64)
    batch = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": torch.ones_like(ids[:, :1]),
        "completion_ids": ids,
        "completion_mask": inputs.mask_NT[part],
        "advantages": inputs.advantages_N[part],
        "old_per_token_logps": inputs.old_logprobs_NT[part],
        "importance_sampling_ratio": log_ratio_NT[part].exp().clamp(max=1.5),
        "num_items_in_batch": inputs.mask_NT.sum(),
    }
    return trainer._compute_loss(fake, None, batch)


def trl_advantages(inputs: Inputs, *, scale: str = "group", gdpo: bool = False) -> list[float]:
    """`GRPOTrainer._generate_and_score_completions` on a stand-in that generates these lengths. Of one reward, or with
    `gdpo` of two, weighted 1 and .5."""
    rows = [[0] * length for length in inputs.lengths_N.tolist()]
    fake = MagicMock()
    fake.configure_mock(
        environment_factories=None,
        environments=None,
        tools=None,
        use_vllm=False,
        beta=0.0,
        num_generations=GROUP,
        multi_objective_aggregation="normalize_then_sum" if gdpo else "sum_then_normalize",
        scale_rewards=scale,
        reward_weights=torch.tensor([1.0, 0.5] if gdpo else [1.0], dtype=torch.float64),
        reward_func_names=["reward", "second"][: 1 + gdpo],
        reward_funcs=[None] * (1 + gdpo),
        mask_truncated_completions=False,
        pad_to_multiple_of=None,
        num_iterations=1,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _logs=defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list)),
        _pending_extra_logs={},
        _pending_metrics={},
    )
    fake.accelerator.configure_mock(device=torch.device("cpu"), process_index=0, num_processes=1, gather=lambda x: x)
    fake._tokenizer.pad_token_id = 0
    fake.model.training = True
    fake.args.configure_mock(gradient_accumulation_steps=1, steps_per_generation=1, per_device_train_batch_size=N)
    fake._generate.return_value = ([[0]] * N, rows, None, [""] * N, None, {}, None, None)
    two_N2 = torch.stack([inputs.eighths_N, inputs.greedy_N], 1)
    fake._calculate_rewards.return_value = two_N2 if gdpo else inputs.rewards_N[:, None]
    trainer = importable("trl.trainer.grpo_trainer").GRPOTrainer
    found = trainer._generate_and_score_completions(fake, [{"prompt": ""}] * N)["advantages"]
    return inputs.tokens(found[:, None] * inputs.mask_NT).tolist()


THEIRS: dict[str, Callable[[Inputs], list[float]]] = {
    "verl: gae": verl_gae,
    "verl: grpo": partial(verl_outcome, function="compute_grpo_outcome_advantage"),
    "verl: grpo without std": partial(
        verl_outcome, function="compute_grpo_outcome_advantage", norm_adv_by_std_in_grpo=False
    ),
    "verl: rloo": partial(verl_outcome, function="compute_rloo_outcome_advantage"),
    "verl: reinforce++": verl_reinforce,
    "verl: reinforce++ baseline": partial(
        verl_outcome, function="compute_reinforce_plus_plus_baseline_outcome_advantage"
    ),
    "verl: remax": verl_remax,
    "verl: vanilla": partial(verl_policy, name="vanilla"),
    "verl: vanilla, seq-mean-token-mean": partial(verl_policy, name="vanilla", average="seq-mean-token-mean"),
    "verl: vanilla, seq-mean-token-sum-norm": partial(verl_policy, name="vanilla", average="seq-mean-token-sum-norm"),
    "verl: vanilla with rollout correction": partial(verl_policy, name="vanilla", correct=True),
    "verl: gspo": partial(verl_policy, name="gspo", average="seq-mean-token-mean", per_response=True),
    "verl: sapo": partial(verl_policy, name="sapo", average="seq-mean-token-mean"),
    "verl: cispo": partial(verl_policy, name="cispo"),
    "verl: value": verl_value,
    "verl: k1": partial(verl_kl, kind="kl"),
    "verl: abs": partial(verl_kl, kind="abs"),
    "verl: k2": partial(verl_kl, kind="mse"),
    "verl: low_var_kl": partial(verl_kl, kind="low_var_kl"),
    "verl: adaptive kl": verl_adaptive,
    "verl: rollout is by token": partial(verl_correction, level="token", threshold=1.5),
    "verl: rollout is by sequence": partial(verl_correction, level="sequence", threshold=1.5),
    "verl: icepop": partial(verl_correction, level="token", threshold="0.7_1.4"),
    "verl: gdpo": verl_gdpo,
    "verl: overlong": verl_overlong,
    "openrlhf: gae": partial(openrlhf_advantages, estimator="gae", kl_coef=0.1, gamma=0.9),
    "openrlhf: reinforce": partial(openrlhf_advantages, estimator="reinforce", kl_coef=0.1, gamma=0.9),
    "openrlhf: reinforce_baseline": partial(openrlhf_advantages, estimator="reinforce_baseline", kl_coef=0.1),
    "openrlhf: rloo": partial(openrlhf_advantages, estimator="rloo"),
    "openrlhf: group_norm": partial(openrlhf_advantages, estimator="group_norm"),
    "openrlhf: dr_grpo": partial(openrlhf_advantages, estimator="dr_grpo"),
    "openrlhf: rloo with kl": partial(openrlhf_advantages, estimator="rloo", kl_coef=0.1),
    "openrlhf: group_norm with kl": partial(openrlhf_advantages, estimator="group_norm", kl_coef=0.1),
    "openrlhf: dr_grpo with kl": partial(openrlhf_advantages, estimator="dr_grpo", kl_coef=0.1),
    "openrlhf: overlong": openrlhf_overlong,
    "openrlhf: seq-mask-tis": partial(
        openrlhf_policy,
        correct=True,
        is_correction_level="seq",
        is_correction_mode="mask",
        is_correction_threshold=[0.8, 1.2],
    ),
    "openrlhf: ppo": openrlhf_policy,
    "openrlhf: ppo by sequence": partial(openrlhf_policy, token_level_loss=False),
    "openrlhf: dual clip": partial(openrlhf_policy, dual_clip=3.0),
    "openrlhf: gspo": partial(openrlhf_policy, policy_loss_type="gspo", per_response=True),
    "openrlhf: icepop": partial(
        openrlhf_policy,
        correct=True,
        is_correction_level="token",
        is_correction_mode="mask",
        is_correction_threshold=[0.7, 1.4],
    ),
    "openrlhf: value": partial(openrlhf_value, clip=0.2),
    "openrlhf: value without clip": partial(openrlhf_value, clip=None),
    "openrlhf: k1": partial(openrlhf_kl, kind="k1"),
    "openrlhf: k2": partial(openrlhf_kl, kind="k2"),
    "openrlhf: k3": partial(openrlhf_kl, kind="k3"),
    "openrlhf: adaptive kl": openrlhf_adaptive,
    "openrlhf: dpo": partial(pairs.openrlhf_dpo, importable=importable),
    "openrlhf: dpo, smoothed": partial(pairs.openrlhf_dpo, importable=importable, label_smoothing=0.2),
    "openrlhf: ipo": partial(pairs.openrlhf_dpo, importable=importable, ipo=True),
    "openrlhf: reward model": partial(pairs.openrlhf_reward, importable=importable),
    "openrlhf: reward model, margin": partial(pairs.openrlhf_reward, importable=importable, margin=True),
    "trl: advantages": partial(trl_advantages, scale="group"),
    "trl: advantages, scale_rewards none": partial(trl_advantages, scale="none"),
    "trl: advantages, scale_rewards batch": partial(trl_advantages, scale="batch"),
    "trl: advantages, normalize_then_sum": partial(trl_advantages, gdpo=True),
    "trl: grpo": partial(trl_policy, loss_type="grpo"),
    "trl: bnpo": partial(trl_policy, loss_type="bnpo"),
    "trl: bnpo of four forwards": partial(trl_policy, loss_type="bnpo", forwards=4),
    "trl: dr_grpo": partial(trl_policy, loss_type="dr_grpo"),
    "trl: dapo": partial(trl_policy, loss_type="dapo"),
    "trl: delta": partial(trl_policy, loss_type="grpo", delta=1.6),
    "trl: gspo": partial(trl_policy, loss_type="grpo", level="sequence"),
    "trl: cispo": partial(trl_policy, loss_type="cispo", high=1.5),
    "trl: sapo": partial(trl_policy, loss_type="sapo"),
    "trl: truncated importance sampling": partial(trl_policy, loss_type="grpo", correct=True),
    "trl: dpo": partial(pairs.trl_dpo, importable=importable, kinds={"sigmoid": 1.0}),
    "trl: dpo with likelihood": partial(pairs.trl_dpo, importable=importable, kinds={"sigmoid": 1.0, "sft": 0.5}),
    "trl: ipo": partial(pairs.trl_dpo, importable=importable, kinds={"ipo": 1.0}),
    "trl: kto": partial(pairs.trl_kto, importable=importable, desirable_weight=1.5, undesirable_weight=0.75),
    "trl: simpo": partial(pairs.trl_simpo, importable=importable, margin=0.4, smoothing=0.1),
    "trl: orpo": partial(pairs.trl_orpo, importable=importable),
    "trl: reward model": partial(pairs.trl_reward, importable=importable),
    "trl: reward model, margin and centering": partial(
        pairs.trl_reward, importable=importable, margin=True, center=0.01
    ),
}
