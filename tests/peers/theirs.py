"""Their side of the comparison: published functions of verl, OpenRLHF and TRL, called on the same inputs.

Runs where `make test-peers` has installed them.
"""

from collections.abc import Callable
from functools import partial

from tests.peers import pairs
from tests.peers.inputs import Inputs
from tests.peers.ours import LEFT_OUT
from tests.peers.reach import importable
from tests.peers.theirs_openrlhf import (
    openrlhf_adaptive,
    openrlhf_advantages,
    openrlhf_kl,
    openrlhf_overlong,
    openrlhf_policy,
    openrlhf_value,
)
from tests.peers.theirs_trl import trl_advantages, trl_policy
from tests.peers.theirs_verl import (
    verl_adaptive,
    verl_correction,
    verl_gae,
    verl_gdpo,
    verl_kl,
    verl_outcome,
    verl_overlong,
    verl_policy,
    verl_reinforce,
    verl_remax,
    verl_value,
)

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
        openrlhf_policy, correct=True, is_correction_level="seq", is_correction_mode="mask",
        is_correction_threshold=[0.8, 1.2],
    ),
    "openrlhf: ppo": openrlhf_policy,
    "openrlhf: ppo by sequence": partial(openrlhf_policy, token_level_loss=False),
    "openrlhf: dual clip": partial(openrlhf_policy, dual_clip=3.0),
    "openrlhf: gspo": partial(openrlhf_policy, policy_loss_type="gspo", per_response=True),
    "openrlhf: icepop": partial(
        openrlhf_policy, correct=True, is_correction_level="token", is_correction_mode="mask",
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
    "trl: grpo with kl": partial(trl_policy, loss_type="grpo", beta=0.1),
    "trl: gspo with kl": partial(trl_policy, loss_type="grpo", level="sequence", beta=0.1),
    "trl: grpo, responses left out": partial(trl_policy, loss_type="grpo", left_out=LEFT_OUT),
    "trl: dr_grpo, responses left out": partial(trl_policy, loss_type="dr_grpo", left_out=LEFT_OUT),
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
}  # fmt: skip
