"""Configuration of the samples that a step trains on, and of the effect of their length on the reward."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveInt, model_validator

from megarlhf.config.roles import FrozenModel, NonNegative


class DynamicSamplingConfig(FrozenModel):
    """Dynamic sampling (DAPO): drop prompts whose responses all get the same reward, and draw responses to other
    prompts in their place. Such groups teach nothing to advantages that compare within groups.

    The reward is then needed, and waited for, before the log-probs are computed. Rewards are compared after `shift` and
    `clip`, before any change for a response's length.
    """

    max_refills: Annotated[int, Field(ge=0)] = 0
    """Further rounds of prompts in a step, each with as many prompts as are missing; 0: none. After the last round
    dropped groups fill the gap, so that every step has the same number of samples. verl's max_num_gen_batches counts
    the first round too."""
    surplus: Annotated[int, Field(ge=0)] = 0
    """Prompts drawn in each step beside its own; the first groups with signal are trained on. Also with
    `rollout.slices`."""
    reward_range: tuple[float, float] | None = None
    """Also drop groups whose mean reward is not strictly between these two (OpenRLHF's
    dynamic_filtering_reward_range)."""

    @model_validator(mode="after")
    def _check(self) -> DynamicSamplingConfig:
        if self.reward_range is None:
            return self
        low, high = self.reward_range
        if not low < high:
            raise ValueError(f"reward_range = [{low}, {high}] holds no reward; give the lower one first")
        if not self.is_on:
            raise ValueError(
                "reward_range has no effect with max_refills = 0 and surplus = 0; set one of them to 1 or more"
            )
        return self

    @property
    def is_on(self) -> bool:
        """Whether a step may draw more prompts than it trains on."""
        return self.max_refills > 0 or self.surplus > 0


class OverlongConfig(FrozenModel):
    """Handling of responses near or at `rollout.max_response_tokens`."""

    buffer_tokens: PositiveInt | None = None
    """Number of last tokens before the longest length over which the reward falls linearly by up to `penalty` (DAPO's
    soft overlong punishment); null: no such penalty."""
    penalty: NonNegative = 1.0
    """Penalty at the longest length."""
    mask: bool = False
    """Leave responses that were cut at the longest length out of the losses (DAPO's overlong filtering, TRL's
    mask_truncated_completions). They still count in the comparison within their group."""

    @model_validator(mode="after")
    def _check(self) -> OverlongConfig:
        if self.buffer_tokens is None and "penalty" in self.model_fields_set and self.penalty != 1.0:
            raise ValueError(
                f"penalty = {self.penalty} has no effect without buffer_tokens, over which the reward falls; give both"
            )
        return self
