"""Configuration of the algorithm: advantage, policy loss, KL to the reference, correction of the rollout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import Field, PositiveInt, model_validator

from megarlhf.config.own_names import OwnPath, PathOnly, known_or_own, require_known_or_own
from megarlhf.config.roles import Fraction, FrozenModel, NonNegative, Positive
from megarlhf.config.selection import DynamicSamplingConfig, OverlongConfig
from megarlhf.own_code.advantage import Advantage, load_advantage

AdvantageName = Literal[
    "gae",
    "reinforce",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "leave_one_out",
    "group_relative",
]
SurrogateName = Literal["clip", "cispo", "sapo", "policy_gradient"]
RatioName = Literal["token", "sequence", "geometric"]
EstimatorName = Literal["k1", "k2", "k3", "abs"]


class AdvantageTraits(NamedTuple):
    """Needs of a built-in advantage; see `own_code.advantage.Advantage`."""

    reads: tuple[str, ...] = ()
    compares_groups: bool = False
    whitens: bool = False
    discounts: bool = False


TRAITS: Mapping[str, AdvantageTraits] = {
    "gae": AdvantageTraits(reads=("values",), whitens=True, discounts=True),
    "reinforce": AdvantageTraits(discounts=True),
    "reinforce_plus_plus": AdvantageTraits(whitens=True, discounts=True),
    "reinforce_plus_plus_baseline": AdvantageTraits(compares_groups=True, whitens=True),
    "remax": AdvantageTraits(reads=("greedy_rewards",)),
    "leave_one_out": AdvantageTraits(compares_groups=True),
    "group_relative": AdvantageTraits(compares_groups=True),
}

PRESETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "advantage": {
        "grpo": {"advantage": "group_relative"},
        "dr_grpo": {"advantage": "group_relative", "scale_by_group_std": False},
        "rloo": {"advantage": "leave_one_out"},
        "reinforce++": {"advantage": "reinforce_plus_plus"},
        "reinforce++_baseline": {"advantage": "reinforce_plus_plus_baseline"},
    },
    "policy_loss": {
        "gspo": {
            "policy_loss": "clip",
            "ratio": "geometric",
            "loss_average": "sequence",
            "clip_low": 3e-4,
            "clip_high": 4e-4,
        },
        "cispo": {"policy_loss": "cispo", "clip_low": None, "clip_high": 4.0},
    },
}
"""Presets: values that stand for several keys. Other keys in the file win, except those in `_FIXED`."""

BY_TURN_INDEX = ("mt_grpo", "mt-grpo", "mtgrpo")
"""Advantages that compare the turns of a group by their index (Zeng et al. 2025). They are refused."""

_FIXED = ("advantage", "policy_loss", "scale_by_group_std", "ratio")
"""Keys that define a preset. A file that sets one of them to another value is refused."""


class KLConfig(FrozenModel):
    coef: NonNegative = 0.0
    """Weight of the KL to the reference. The adaptive controller starts from it."""
    log: bool = False
    """Measure the KL even if nothing else reads it (coef = 0, no train.stop.max_kl). This takes a reference in memory
    and a forward of it in each step. Otherwise the metric `kl` is null in that case and no reference is built."""
    placement: Literal["reward", "loss"] = "reward"
    """`reward`: -coef x kl on each token's reward (PPO). `loss`: + coef x kl in the loss (GRPO)."""
    estimator: Annotated[EstimatorName | OwnPath, known_or_own("estimator", *get_args(EstimatorName))] = "k1"
    """Schulman's estimators k1, k2 and k3, or `abs`, the absolute value of k1, for the KL in the reward only; or one of
    your own. The metric `kl` reports the same estimator."""
    clamp: Positive | None = None
    """Clamp each token's estimate to [-clamp, clamp], in the reward, the loss and the metric `kl`. verl's low_var_kl
    and OpenRLHF use 10."""
    ratio_weighted: bool = False
    """For the KL in the loss: multiply each token's estimate by the ratio of new to old probability (`algo.ratio`),
    through which the gradient flows too. The gradient of k1 and k3 is then that of the KL itself, on fresh samples and
    later (DeepSeek-V3.2; TRL's use_bias_correction_kl, its default)."""
    credit: Literal["response", "token"] = "response"
    """For the KL in the reward with advantages that compare groups. `response`: compare the KL of whole responses
    within their group, like the rewards. `token`: subtract from each token's advantage the KL of it and of later tokens
    (OpenRLHF)."""
    controller: Literal["fixed", "adaptive"] = "fixed"
    """`adaptive`: adjust coef so that the measured KL approaches `target` (Ziegler et al. 2019, section 2.2). After
    each step coef is multiplied by 1 + samples / horizon x error, where error = kl / target - 1, clipped to [-0.2,
    0.2]."""
    target: Positive | None = None
    """Target of the adaptive controller for the metric `kl`, the mean per response token. Ziegler et al. count per
    response: divide their target by the length of a response."""
    horizon: PositiveInt = 10000
    """Samples over which the adaptive controller may change coef by a fifth."""

    @model_validator(mode="after")
    def _check(self) -> KLConfig:
        if self.ratio_weighted and (self.placement != "loss" or self.coef == 0):
            raise ValueError(
                f"ratio_weighted is for the KL in the loss; got placement = {self.placement!r}, coef = {self.coef}: "
                "set placement: loss and a coef above 0, or leave it out"
            )
        useless = ("k2", "abs") if self.ratio_weighted else ("k1", "abs")
        if self.placement == "loss" and self.estimator in useless and self.coef > 0:
            why = {
                "k2": "estimator k2 weighted by the ratio has the gradient of no divergence; without the weight it is "
                "right on fresh samples",
                "k1": "estimator k1 in the loss has a gradient of mean zero and regularises nothing",
                "abs": "estimator abs in the loss has the gradient of no divergence",
            }
            raise ValueError(f"{why[self.estimator]}; use k3 or k2 with placement 'loss', or placement 'reward'")
        if self.controller == "adaptive" and (self.target is None or self.coef == 0):
            raise ValueError(
                f"controller 'adaptive' got target = {self.target} and coef = {self.coef}; it multiplies coef so that "
                "kl comes to the target: give both, above 0"
            )
        if self.controller == "fixed" and self.target is not None:
            raise ValueError(f"target = {self.target} has no effect with controller 'fixed'; set controller: adaptive")
        return self


class RolloutCorrectionConfig(FrozenModel):
    """Importance sampling from the distribution that drew the samples to the trainer's at the beginning of the step.

    The engine's log-probs differ from the trainer's by rounding, because it computes in another dtype, or because older
    weights drew the token (`rollout.slices`). The ratio exp(trainer's - engine's log-prob) of each token, or of its
    whole response, corrects for it.
    """

    kind: Literal["auto", "none", "truncate", "mask"] = "auto"
    """`auto`: `truncate` with `rollout.slices` above 1 or `rollout.steps_ahead`, otherwise `none`. `truncate`: the loss
    of a token is multiplied by min(ratio, high) (truncated importance sampling). `mask`: it is multiplied by the ratio
    inside [low, high], and left out outside (icepop)."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """Ratio of the token, of its response (the product), or the geometric mean over its response."""
    low: NonNegative = 0.5
    """Smallest ratio that is not masked; `mask` only."""
    high: Positive = 2.0
    """Largest ratio that is neither truncated nor masked."""
    mask_weight: Literal["level", "token"] = "level"
    """`mask` only: multiply tokens that are not masked by the ratio of `level`, or by their own ratio. Level
    `geometric` with mask_weight `token` is OpenRLHF's seq-mask-tis."""

    @model_validator(mode="after")
    def _check(self) -> RolloutCorrectionConfig:
        if self.kind == "truncate" and self.high < 1:
            raise ValueError(f"high = {self.high} truncates ratios of 1, which are right; give 1 or more")
        if self.kind == "mask" and not self.low < 1 < self.high:
            raise ValueError(
                f"low = {self.low} and high = {self.high} leave out ratios of 1, which are right; give low < 1 < high"
            )
        return self


class AlgoConfig(FrozenModel):
    advantage: AdvantageName | OwnPath = "gae"
    """Advantage estimator. `gae`: generalised advantage estimation, with a critic. `reinforce`: discounted sum of the
    rewards from the token on. `reinforce_plus_plus`: the same, whitened. `reinforce_plus_plus_baseline`: the response's
    reward minus its group's mean, whitened. `remax`: the reward minus that of the greedy response to the same prompt.
    `leave_one_out` (or `rloo`): the reward minus the mean of the other responses to the prompt. `group_relative` (or
    `grpo`): the reward minus the group's mean, divided by its standard deviation. `dr_grpo`: the same without the
    division. Or one of your own."""
    gamma: Fraction = 1.0
    """Discount of later rewards; `gae`, `reinforce` and `reinforce_plus_plus` only."""
    lam: Fraction = 0.95
    """GAE's lambda: 1 trusts the rewards, 0 the critic; `gae` only."""
    critic_lam: Fraction | None = None
    """Lambda of the returns that the critic learns; null: `lam`. With 1 the critic learns from rewards alone, without
    the errors of its own values (VC-PPO, Yuan et al. 2025); `gae` only."""
    whiten_advantages: bool | None = None
    """Subtract the mean over response tokens and divide by the standard deviation. Default: true for `gae` and the two
    forms of `reinforce_plus_plus`, false for the others."""
    whiten_over: Literal["step", "mini_batch"] = "step"
    """Take mean and deviation over the response tokens of the step, or of each mini-batch."""
    whiten_variance: Literal["biased", "unbiased"] = "biased"
    """Divide by the number of tokens (OpenRLHF), or by one less (verl, TRL)."""
    scale_by_group_std: bool = True
    """`group_relative` only: divide by the group's standard deviation."""
    group_std: Literal["unbiased", "biased"] = "unbiased"
    """`group_relative` only: variance divided by the group's size minus 1 (TRL, verl, OpenRLHF), or by its size."""
    group_std_over: Literal["group", "step"] = "group"
    """`group_relative` only: divide by the deviation of the group's rewards, or of all rewards of the step (TRL's
    scale_rewards: batch)."""
    group_std_eps: NonNegative = 1e-6
    """`group_relative` only: added to the deviation. TRL uses 1e-4, OpenRLHF 1e-9."""
    group_std_floor: NonNegative = 0.0
    """`group_relative` only: smallest divisor. It keeps groups of nearly equal rewards from being amplified."""
    group_of_one: Literal["zero", "reward"] = "zero"
    """Advantage of a response that is alone in its group, for advantages that compare within groups: zero, or its
    reward (verl)."""
    policy_loss: SurrogateName | OwnPath = "clip"
    """`clip`: PPO's clipped surrogate. `cispo`: the clipped ratio weights the gradient of the log-prob. `sapo`: a
    smooth gate. `policy_gradient`: no ratio. `gspo` stands for `clip` with ratio `geometric`, loss_average `sequence`,
    clip_low 3e-4 and clip_high 4e-4. The defaults of `cispo` are no clip_low and clip_high 4. Or a surrogate of your
    own, which has the defaults of `clip`."""
    ratio: Annotated[RatioName | OwnPath, known_or_own("ratio", *get_args(RatioName))] = "token"
    """Ratio of new to old probability: of the token, of its response (the product), or the geometric mean over it; or
    one of your own."""
    token_weights: PathOnly | None = None
    """Your own function of weights, by which the loss of each token is multiplied."""
    clip_low: Positive | None = 0.2
    """Lower clip of the ratio, at 1 - clip_low; null: none."""
    clip_high: Positive = 0.2
    """Upper clip of the ratio, at 1 + clip_high."""
    clip_dual: Annotated[float, Field(gt=1.0)] | None = None
    """`clip` only: for a negative advantage the loss is at most this multiple of its absolute value (Ye et al. 2020:
    3)."""
    clip_delta: Annotated[float, Field(gt=1.0)] | None = None
    """`clip` only: upper bound of the ratio outside the clip, above 1 + clip_high (INTELLECT-2's two-sided clip, TRL's
    delta)."""
    sapo_temperature_positive: Positive = 1.0
    """`sapo` only: temperature of the gate for positive advantages."""
    sapo_temperature_negative: Positive = 1.05
    """`sapo` only: temperature of the gate for other advantages."""
    value_clip: Positive | None = 0.2
    """Largest change of a value that reduces the critic's loss; null: no clip."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy that is subtracted from the policy loss."""
    entropy_coef_end: NonNegative | None = None
    """Weight in the last step of the run, reached in equal steps; null: the weight is constant."""
    loss_average: Literal["token", "sequence", "constant", "bnpo"] = "token"
    """`token`: mean over the response tokens of the mini-batch (DAPO). `sequence`: mean over sequences of their token
    means (GRPO). `constant`: mean over sequences of their token sums divided by `loss_constant` (Dr. GRPO). `bnpo`:
    mean over blocks of `loss_block_samples` samples of their token means (TRL's bnpo)."""
    loss_constant: PositiveInt | None = None
    """`constant` only: the divisor; default: rollout.max_response_tokens."""
    loss_block_samples: PositiveInt = 1
    """`bnpo` only: samples of a block, in the order of the mini-batch. 1 equals `sequence`; the size of the mini-batch
    equals `token`."""
    loss_counts_left_out: bool = False
    """`sequence` and `constant` only: divide by all responses of the mini-batch, including those that are left out
    (masked, or without a reward), as TRL's grpo and dr_grpo do. False: divide by those that are trained on."""
    unrewarded: Literal["stop", "drop"] = "stop"
    """Handling of a sample for which every reward is None: end the run, or leave the sample out of the step. The first
    such sample is shown in both cases. For a reward that failed see `rewards[].on_failure`."""
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    overlong: OverlongConfig = OverlongConfig()
    missing_end_penalty: NonNegative = 0.0
    """Subtracted from the reward of a response that was cut before an end token (TRL's missing_eos_penalty)."""
    kl: KLConfig = KLConfig()
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    shuffle_rewards: bool = False
    """Control experiment: permute the rewards over the step's samples, so that they carry no information about the
    responses. The policy should then learn nothing, with one exception: with `gae` at lam < 1 the critic's values enter
    the advantages, and a critic that starts from the reward model knows good responses without any reward. Use lam = 1,
    a fresh critic, or an estimator without a critic for a clean control. The KL term is unchanged."""

    @property
    def traits(self) -> AdvantageTraits | Advantage:
        """Needs of the advantage. Raises: ValueError for an own one that cannot be loaded."""
        return TRAITS[self.advantage] if self.advantage in TRAITS else load_advantage(self.advantage)

    @property
    def needs_critic(self) -> bool:
        return "values" in self.traits.reads

    @property
    def whitens(self) -> bool:
        return self.traits.whitens if self.whiten_advantages is None else self.whiten_advantages

    @property
    def kl_in_reward(self) -> bool:
        return self.kl.placement == "reward" and self.kl.coef > 0

    @property
    def kl_in_loss(self) -> bool:
        return self.kl.placement == "loss" and self.kl.coef > 0

    def entropy_coef_at(self, step: int, num_steps: int) -> float:
        """Weight in step `step` (0 is the first) of a run of `num_steps`."""
        if self.entropy_coef_end is None:
            return self.entropy_coef
        share = step / max(1, num_steps - 1)
        return self.entropy_coef + (self.entropy_coef_end - self.entropy_coef) * min(share, 1.0)

    @model_validator(mode="before")
    @classmethod
    def _spell_out(cls, data: Any) -> Any:
        """Replace a preset by its keys."""
        if not isinstance(data, dict):
            return data
        names = {"advantage": AdvantageName, "policy_loss": SurrogateName}
        for key, presets in PRESETS.items():
            name = data.get(key)
            if key == "advantage" and name in BY_TURN_INDEX:
                raise ValueError(
                    f"advantage = {name!r} compares the turns of a group by their index: where the policy chooses when "
                    "to stop, the later turns of a group are a selection, and their mean is a biased baseline; take "
                    "group_relative or leave_one_out, which compare whole conversations, or gae"
                )
            if isinstance(name, str):
                require_known_or_own(key, name, list(dict.fromkeys((*get_args(names[key]), *presets))))
            if not isinstance(name, str) or name not in presets:
                continue
            for other, value in presets[name].items():
                if other not in _FIXED or other == key:
                    continue
                if other in data and data[other] != value:
                    raise ValueError(f"{key} = {name!r} means {other} = {value}; got {other} = {data[other]}: drop one")
            data = {**presets[name], **data, key: presets[name][key]}
        return data

    @model_validator(mode="after")
    def _check(self) -> AlgoConfig:
        if self.clip_low is not None and self.clip_low >= 1 and self.policy_loss in ("clip", "cispo"):
            raise ValueError(
                f"clip_low = {self.clip_low} puts the bound at {1 - self.clip_low:g}, below every ratio; give a number "
                "below 1, or null for no bound"
            )
        if self.clip_delta is not None and self.clip_delta <= 1 + self.clip_high:
            raise ValueError(
                f"clip_delta = {self.clip_delta} is inside the clip, which ends at 1 + clip_high = "
                f"{1 + self.clip_high:g}; give a larger one, or leave it out"
            )
        return self
