"""Typed configuration: all keys of a YAML file or of `section.key=value`, and every check that needs no device.

Objects are frozen after loading. A role (`actor`, `critic`, `reference`, `reward_model`) is the same section
in every command (`roles.py`). Derived numbers are in `planning/`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from megarlhf.config.choices import PatienceConfig, check_choices
from megarlhf.config.data import DataConfig, SFTDataConfig
from megarlhf.config.observe import ObserveConfig
from megarlhf.config.profile import ProfileConfig, check_profile_steps
from megarlhf.config.roles import FrozenModel, NonNegative, Positive, RoleConfig, require_all_ranks
from megarlhf.config.run import CheckpointConfig, RunConfig
from megarlhf.config.skip import SkipConfig
from megarlhf.config.watchdog import WatchdogConfig


class EvalConfig(FrozenModel):
    every: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations on held-out data; 0: before the first and after the last step only."""
    max_samples: PositiveInt | None = None
    """Use only the first so many held-out samples."""


UNKNOWN_STEPS = 10**9
"""`num_steps` until the records are counted, where `num_epochs` is given."""


class EpochsConfig(FrozenModel):
    num_epochs: Positive | None = None
    """Passes over the training data, in place of `num_steps`: as many steps as take each usable record that often, the
    last step included. In `rl` a record is a prompt. The run's config.yaml has the number of steps."""

    @model_validator(mode="before")
    @classmethod
    def _steps_of_epochs(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("num_epochs") is None:
            return data
        if data.get("num_steps") not in (None, UNKNOWN_STEPS):
            raise ValueError(
                f"num_steps = {data['num_steps']} and num_epochs = {data['num_epochs']} both say how long the run is; "
                "give one of them"
            )
        return {**data, "num_steps": UNKNOWN_STEPS}


class MicroBatchConfig(FrozenModel):
    """Size of one forward: give one of the two limits."""

    max_tokens_per_micro_batch: PositiveInt | None = None
    """Packed: sequences end to end, up to this many tokens per forward of one data-parallel rank, balanced over ranks
    by their cost. No sequence is split, so the longest must fit (both of a pair, in `rm` and `dpo`). Under context
    parallelism tokens are still those of whole sequences, and each of the cp ranks holds 1/cp of them: cp times as many
    tokens take the same memory of a rank."""
    micro_batch_samples: PositiveInt | None = None
    """Padded: this many samples per forward of one data-parallel rank, all as long as the longest of the step."""
    share_prompts: bool = True
    """Compute a prompt once for all of its responses in a packed micro-batch: the responses to one prompt in `rl`, both
    of a pair in `rm` and `dpo`. The numbers are the same, up to rounding. Without effect in padded rows and under
    context parallelism."""

    @model_validator(mode="after")
    def _one_of_the_two(self) -> Self:
        given = (self.max_tokens_per_micro_batch, self.micro_batch_samples)
        if given.count(None) != 1:
            raise ValueError(
                f"got max_tokens_per_micro_batch = {given[0]} and micro_batch_samples = {given[1]}; give one of them: "
                "the first packs sequences end to end, the second pads them to the longest. On the command line "
                "train.micro_batch_samples= (nothing behind it) unsets a key of the file"
            )
        return self

    def rows(self, longest: int) -> int:
        """Rows of `longest` tokens per forward, for sampling with the actor itself, which needs padded rows."""
        budget = self.max_tokens_per_micro_batch
        return self.micro_batch_samples or max(1, (budget or 0) // longest)


class TrainConfig(MicroBatchConfig, SkipConfig, EpochsConfig):
    num_steps: PositiveInt
    """Optimizer steps."""
    mini_batch_samples: PositiveInt
    """Samples per optimizer step, over all ranks. In `rm` and `dpo` a sample is a pair of responses."""
    stop: PatienceConfig = PatienceConfig()


class SFTConfig(FrozenModel):
    command: ClassVar[str] = "sft"

    run: RunConfig
    actor: RoleConfig
    data: SFTDataConfig
    train: TrainConfig
    eval: EvalConfig = EvalConfig()
    observe: ObserveConfig = ObserveConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    profile: ProfileConfig = ProfileConfig()

    _profiled = model_validator(mode="after")(check_profile_steps)

    def roles(self) -> dict[str, RoleConfig]:
        """The role that this run builds."""
        return {"actor": self.actor}

    @model_validator(mode="after")
    def _check(self) -> SFTConfig:
        require_all_ranks({"actor": self.actor})
        check_choices(self)
        return self


class RMConfig(FrozenModel):
    command: ClassVar[str] = "rm"

    run: RunConfig
    reward_model: RoleConfig
    """A language model whose head is replaced by a scalar one."""
    data: DataConfig
    train: TrainConfig
    loss: Literal["last_token", "response_mean", "aligned_span"] = "last_token"
    """`last_token`: InstructGPT's loss on the score of the last token. `response_mean`: the same on the mean score of
    the response's tokens. `aligned_span`: DeepSpeed-Chat's loss from the first differing token on. The score of a text
    is that of its last token; with `response_mean` it is the mean, which the export's config.json records and `rl` then
    computes."""
    margin: bool = False
    """Read the number `margin` of each pair, by which the score of the chosen response should exceed the other's
    (Llama 2); not with `aligned_span`."""
    center_coef: NonNegative = 0.0
    """Weight of (chosen + rejected)^2, which fixes the mean score that a ranking loss leaves undetermined."""
    unit_variance: bool = False
    """Divide the head of each export by the standard deviation of its held-out scores. Training and resume points are
    not changed; after the last step the model itself is divided."""
    eval: EvalConfig = EvalConfig()
    observe: ObserveConfig = ObserveConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    profile: ProfileConfig = ProfileConfig()

    _profiled = model_validator(mode="after")(check_profile_steps)

    def roles(self) -> dict[str, RoleConfig]:
        """The role that this run builds."""
        return {"reward_model": self.reward_model}

    @model_validator(mode="after")
    def _check(self) -> RMConfig:
        require_all_ranks({"reward_model": self.reward_model})
        self.data.require_no_cut("rm")
        if self.unit_variance and not self.data.has_validation:
            raise ValueError("unit_variance measures the scores of held-out pairs: set data.validation")
        best = self.checkpoint.best
        check_choices(self)
        if self.unit_variance and best is not None and best.metric != "eval_pair_accuracy":
            raise ValueError(
                f"checkpoint.best.metric = {best.metric} with unit_variance: the last evaluation has scores on "
                "another scale than the earlier ones; choose by eval_pair_accuracy, which no scale changes"
            )
        if self.margin and self.loss == "aligned_span":
            raise ValueError(
                "margin = true needs one score for each response, which loss = aligned_span does not have: change one "
                "of the two"
            )
        lora = self.reward_model.lora
        if lora is not None and lora.export != "merged" and self.loss == "response_mean":
            raise ValueError(
                f"reward_model.lora.export = {lora.export} with loss = response_mean: a PEFT adapter cannot "
                "record that a score is the mean over the response, and a reader would take the last token's score; "
                "use export: merged, or loss: last_token"
            )
        return self
