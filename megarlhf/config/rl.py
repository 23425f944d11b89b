"""Configuration of `megarlhf rl`: all keys, and every check that needs no device."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, PositiveInt, model_validator

from megarlhf.config.algo import AlgoConfig, RolloutCorrectionConfig
from megarlhf.config.auxiliary import EMAConfig, PTXConfig, ReferenceUpdateConfig
from megarlhf.config.choices import DEFAULT, StopConfig, check_choices
from megarlhf.config.commands import EpochsConfig, EvalConfig, MicroBatchConfig
from megarlhf.config.data import PromptDataConfig
from megarlhf.config.environment import EnvironmentConfig, require_environment
from megarlhf.config.observe import ObserveConfig
from megarlhf.config.own_names import PathOnly
from megarlhf.config.profile import ProfileConfig, check_profile_steps
from megarlhf.config.rewards import RewardConfig
from megarlhf.config.role_table import roles_of_rl, trained_roles
from megarlhf.config.roles import FrozenModel, Positive, RoleConfig, require_all_ranks
from megarlhf.config.rollout import RolloutConfig
from megarlhf.config.run import CheckpointConfig, RunConfig
from megarlhf.config.shared_base import is_base_of
from megarlhf.config.shuffle import Shuffle
from megarlhf.config.skip import SkipConfig
from megarlhf.config.tracking import AccuracyConfig, SamplesConfig
from megarlhf.config.watchdog import WatchdogConfig


class RLEvalConfig(EvalConfig, AccuracyConfig):
    """Greedy responses to held-out prompts."""


class RLTrainConfig(MicroBatchConfig, SkipConfig, EpochsConfig):
    num_steps: Annotated[int, Field(ge=0)]
    """Rollout-and-train cycles."""
    prompts_per_step: PositiveInt
    """Prompts sampled from per step, over all ranks."""
    mini_batch_samples: PositiveInt
    """Samples (sequences) per optimizer step, over all ranks; divides the samples of a step."""
    epochs_per_step: PositiveInt = 1
    """Passes over the samples of a step."""
    shuffle: Shuffle = "samples"
    """Random order of the mini-batches, anew for each pass. `samples`: each sample on its own. `groups`: all samples of
    a prompt together, so that a mini-batch has few prompts to compute. `none`: the order of sampling."""
    sampler: PathOnly | None = None
    """Your own choice of each step's prompts, such as a curriculum: a function (prompts, step, count, seed), or a class
    with state. Default: a new random order in each pass."""
    critic_warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Number of first steps in which only the critic is trained; not used without a critic. The actor's learning-rate
    schedule begins after them."""
    max_policy_kl: Positive | None = None
    """Skip the remaining updates of the actor in a step once an update's mini-batch has a `policy_kl` (old to new
    policy) above this. The critic's updates are made. (Spinning Up and Stable-Baselines3 stop at 1.5 x their target_kl,
    and skip the update that exceeds it too.)"""
    stop: StopConfig = StopConfig()


class RLConfig(FrozenModel):
    command: ClassVar[str] = "rl"

    run: RunConfig
    actor: RoleConfig
    reference: RoleConfig | None = None
    """Model that the KL is measured against, never trained. Default: the actor's model and layout. Built only if
    something reads the KL: `algo.kl.coef`, `train.stop.max_kl`, or `algo.kl.log`."""
    critic: RoleConfig | None = None
    """Built only if the advantage estimator needs values."""
    reward_model: RoleConfig | None = None
    """Built only if `rewards` names it."""
    rewards: tuple[RewardConfig, ...]
    """Sources of rewards. Their weighted sum is the reward of a response."""
    data: PromptDataConfig
    train: RLTrainConfig
    rollout: RolloutConfig = RolloutConfig()
    environment: EnvironmentConfig | None = None
    """Answers the model's turns: a response becomes a conversation (docs/environments.md)."""
    algo: AlgoConfig = AlgoConfig()
    ptx: PTXConfig | None = None
    ema: EMAConfig | None = None
    reference_update: ReferenceUpdateConfig | None = None
    eval: RLEvalConfig = RLEvalConfig()
    samples: SamplesConfig = SamplesConfig()
    observe: ObserveConfig = ObserveConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    profile: ProfileConfig = ProfileConfig()

    _profiled = model_validator(mode="after")(check_profile_steps)

    @property
    def loss_constant(self) -> int:
        """Divisor of the sums of sequences for `algo.loss_average: constant`."""
        return self.algo.loss_constant or self.rollout.max_response_tokens

    @property
    def rollout_correction(self) -> RolloutCorrectionConfig:
        """`algo.rollout_correction` with the kind that `auto` stands for."""
        given = self.algo.rollout_correction
        kind = "truncate" if self.rollout.is_stale else "none"
        return given if given.kind != "auto" else given.model_copy(update={"kind": kind})

    @property
    def needs_reference(self) -> bool:
        """Whether anything reads the KL."""
        read = self.algo.kl.coef > 0 or self.algo.kl.log or self.train.stop.max_kl is not None
        return read or "ref_logprobs" in self.algo.traits.reads

    @property
    def prompts_drawn(self) -> int:
        """Prompts that a step draws from at first: those it trains on and the surplus of dynamic sampling."""
        return self.train.prompts_per_step + self.algo.dynamic_sampling.surplus

    @property
    def updates_per_step(self) -> int:
        """Updates of the actor in a step, if none is skipped."""
        samples = self.train.prompts_per_step * self.rollout.num_samples_per_prompt
        return self.train.epochs_per_step * (samples // self.train.mini_batch_samples)

    def old_logprobs_in_training(self, step: int) -> bool:
        """Whether the forward of the only update in `step` (0 is the first) computes the old log-probs.

        It runs at the weights before the step, so no separate forward is needed. A KL in the reward reads them
        earlier.
        """
        actor_learns = not self.algo.needs_critic or step >= self.train.critic_warmup_steps
        read_before = self.algo.kl_in_reward or "old_logprobs" in self.algo.traits.reads
        return self.updates_per_step == 1 and actor_learns and not read_before

    @property
    def chosen_by(self) -> set[str]:
        """Metrics of held-out data that choose the best checkpoint or the end of the run."""
        best, stop = self.checkpoint.best, self.train.stop
        by_best = set() if best is None else {best.metric}
        return by_best | (set() if stop.patience is None else {stop.metric or DEFAULT["rl"]})

    @property
    def uses_reward_model(self) -> bool:
        return any(reward.kind == "model" for reward in self.rewards)

    def optimizer_steps(self, role: str) -> int:
        """Number of updates of `role` (actor or critic) in the run: the horizon of its learning rate."""
        waits = role == "actor" and "critic" in self.roles()
        steps = self.train.num_steps - (self.train.critic_warmup_steps if waits else 0)
        return max(0, steps) * self.updates_per_step

    @property
    def reference_is_base(self) -> bool:
        """Whether the reference is the actor with its adapter switched off."""
        return self.needs_reference and self.reference_update is None and is_base_of(self.actor, self.reference)

    def roles(self) -> dict[str, RoleConfig]:
        """The roles that this run builds."""
        return roles_of_rl(self)

    @model_validator(mode="after")
    def _check(self) -> RLConfig:
        self.require_rewards()
        self._check_environment()
        if self.algo.needs_critic and self.critic is None:
            raise ValueError(f"algo.advantage = {self.algo.advantage!r} needs values: give a critic section")
        if self.uses_reward_model and self.reward_model is None:
            raise ValueError("rewards names the reward model: give a reward_model section")
        if self.algo.traits.compares_groups and self.rollout.num_samples_per_prompt < 2:
            raise ValueError(
                f"algo.advantage = {self.algo.advantage!r} compares the samples of one prompt and needs "
                f"rollout.num_samples_per_prompt >= 2; got {self.rollout.num_samples_per_prompt}"
            )
        if self.reference_update is not None and not self.needs_reference:
            raise ValueError(
                "reference_update moves a reference, and nothing measures the KL to it: set algo.kl.coef or "
                "train.stop.max_kl, or algo.kl.log to only report it, or leave reference_update out"
            )
        if self.reference_update is not None and self.actor.lora is not None:
            self._check_moving_adapter()
        self._check_groups()
        self.rollout.require_drawable(self.algo.rollout_correction.kind, self.algo.dynamic_sampling.max_refills)
        self._check_sampler()
        self._check_controller()
        self._check_ptx()
        if self.rollout.filters:
            raise ValueError(
                f"{' and '.join(self.rollout.filters)} cannot be trained with: the trainer's log-probs are of the full "
                "distribution, and their ratios to a restricted distribution would be wrong from the first step on. "
                "Leave it out; generate and eval take it"
            )
        trained = trained_roles(self)
        require_all_ranks({name: role for name, role in self.roles().items() if name in trained})
        for name, role in self.roles().items():
            if name != "critic" and role.model.fresh_head:
                raise ValueError(
                    f"{name}.model.fresh_head: only a critic may start from a fresh head, which it learns; a reward "
                    "model with one is useless, and other roles have no scalar head. Leave it out"
                )
        check_choices(self)
        longest = self.data.max_prompt_tokens + self.rollout.max_response_tokens
        budget = self.train.max_tokens_per_micro_batch
        if budget is not None and longest > budget:
            raise ValueError(
                f"data.max_prompt_tokens + rollout.max_response_tokens = {longest} tokens, but "
                f"train.max_tokens_per_micro_batch = {budget}, and a sequence is never split; raise it to {longest} or "
                "more, or lower the limits"
            )
        return self

    def _check_environment(self) -> None:
        """Raises: ValueError for what conversations with an environment cannot have."""
        require_environment(self.environment, self.rewards)
        if self.environment is not None and "greedy_rewards" in self.algo.traits.reads:
            raise ValueError(
                f"algo.advantage = {self.algo.advantage!r} compares with one greedy response to each prompt, which is "
                "no conversation with the environment; take group_relative, leave_one_out or another advantage"
            )

    def require_rewards(self) -> None:
        """Raises: ValueError without a reward."""
        if not self.rewards:
            raise ValueError("rewards is empty; name at least one, such as [{kind: rule, rule: exact_match}]")

    @property
    def retokenizes(self) -> bool:
        """Whether the reward model has its own tokenizer and reads none of the actor's token ids."""
        return all(reward.retokenize for reward in self.rewards if reward.kind == "model")

    @property
    def ptx_max_tokens(self) -> int:
        """Longest text of the pretraining mix."""
        longest = self.data.max_prompt_tokens + self.rollout.max_response_tokens
        return longest if self.ptx is None or self.ptx.max_tokens is None else self.ptx.max_tokens

    def _check_ptx(self) -> None:
        """Raises: ValueError for texts that do not fit into micro-batches."""
        if self.ptx is None:
            return
        budget = self.train.max_tokens_per_micro_batch
        if budget is None:
            raise ValueError(
                "ptx needs packed micro-batches, as texts and samples differ in length: set "
                "train.max_tokens_per_micro_batch in place of train.micro_batch_samples"
            )
        if not 2 <= self.ptx_max_tokens <= budget:
            raise ValueError(
                f"ptx.max_tokens = {self.ptx_max_tokens} does not fit: give 2 to train.max_tokens_per_micro_batch = "
                f"{budget}"
            )

    def _check_moving_adapter(self) -> None:
        """Raises: ValueError for a reference that cannot follow the actor's adapter."""
        assert self.reference_update is not None
        if self.reference is not None and self.reference.lora != self.actor.lora:
            raise ValueError(
                "reference_update moves the reference to the actor, whose adapter it does not have: leave the section "
                "reference out, or give it the actor's lora"
            )
        if self.reference_update.mixup != 1:
            raise ValueError(
                f"reference_update.mixup = {self.reference_update.mixup:g} would mix A and B of two adapters each by "
                "itself, whose product is not the mixture; with actor.lora give 1, which takes the actor's"
            )

    def _check_controller(self) -> None:
        """Raises: ValueError if a single step could make the KL's coefficient 0 or negative."""
        samples, horizon = self.train.prompts_per_step * self.rollout.num_samples_per_prompt, self.algo.kl.horizon
        if self.algo.kl.controller == "adaptive" and samples >= 5 * horizon:
            raise ValueError(
                f"algo.kl.horizon = {horizon}, and a step has {samples} samples: its factor of the coefficient, 1 + "
                f"samples / horizon x (-0.2 to 0.2), would not stay above 0; give {samples // 5 + 1} or more, usually "
                f"{samples} or more"
            )

    def _check_sampler(self) -> None:
        """Raises: ValueError for other keys that choose prompts beside an own sampler."""
        if self.train.sampler is None:
            return
        others = {
            "algo.dynamic_sampling": self.algo.dynamic_sampling.is_on,
            "data.train with weights": any(source.weight is not None for source in self.data.train),
        }
        for other, is_set in others.items():
            if is_set:
                raise ValueError(
                    f"train.sampler = {self.train.sampler} chooses the prompts of a step, and so does {other}: leave "
                    "one of them out"
                )

    def _check_groups(self) -> None:
        """Raises: ValueError for a comparison within groups of one sample, and for a buffer longer than a response."""
        samples, buffer = self.rollout.num_samples_per_prompt, self.algo.overlong.buffer_tokens
        comparing = [
            f"rewards[{n}].normalise = group" for n, reward in enumerate(self.rewards) if reward.normalise == "group"
        ]
        if comparing and "greedy_rewards" in self.algo.traits.reads:
            raise ValueError(
                f"{comparing[0]}, and algo.advantage = {self.algo.advantage!r} compares with one greedy response to a "
                "prompt, which is alone in its group: its normalised reward would always be 0. Choose another "
                "advantage or normalise"
            )
        if self.algo.dynamic_sampling.is_on:
            comparing.append("algo.dynamic_sampling")
        if comparing and samples < 2:
            raise ValueError(
                f"{comparing[0]} compares the samples of one prompt and needs rollout.num_samples_per_prompt >= 2; got "
                f"{samples}"
            )
        if buffer is not None and buffer > self.rollout.max_response_tokens:
            raise ValueError(
                f"algo.overlong.buffer_tokens = {buffer} is longer than the longest response, "
                f"rollout.max_response_tokens = {self.rollout.max_response_tokens}; give less"
            )
