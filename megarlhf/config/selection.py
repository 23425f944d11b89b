"""Configuration of which samples of a step are trained on, and of what their length does to their reward."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveInt, model_validator

from megarlhf.config.roles import FrozenModel, NonNegative


class DynamicSamplingConfig(FrozenModel):
    """Prompts whose responses all get the same reward teach nothing where responses are compared within their group.
    Dynamic sampling (DAPO) drops them and draws responses to other prompts in their place.

    The reward is then needed before the log-probs are computed, and is waited for. Compared is what the rewards say,
    after `shift` and `clip`, before anything about a response's length.
    """

    max_refills: Annotated[int, Field(ge=0)] = 0
    """Further rounds of prompts in a step, as many prompts each as are missing; 0: no dynamic sampling. What is missing
    after the last round is filled up with the dropped groups, so that a step always has as many samples. verl's
    max_num_gen_batches counts the first round too."""
    reward_range: tuple[float, float] | None = None
    """Also drop groups whose mean reward is not between the two, which themselves are outside (OpenRLHF's
    dynamic_filtering_reward_range)."""

    @model_validator(mode="after")
    def _check(self) -> DynamicSamplingConfig:
        if self.reward_range is None:
            return self
        low, high = self.reward_range
        if not low < high:
            raise ValueError(f"reward_range = [{low}, {high}] holds no reward; give the lower one first")
        if not self.max_refills:
            raise ValueError("reward_range has no effect with max_refills = 0; set max_refills to 1 or more")
        return self


class OverlongConfig(FrozenModel):
    """Responses near or at `rollout.max_response_tokens`."""

    buffer_tokens: PositiveInt | None = None
    """The last so many tokens before the longest length, in which the reward falls in a straight line by up to
    `penalty` (DAPO's soft overlong punishment); null: no such penalty."""
    penalty: NonNegative = 1.0
    """At the longest length."""
    mask: bool = False
    """Leave responses that were cut at the longest length out of the losses (DAPO's overlong filtering, TRL's
    mask_truncated_completions). In the comparison within their group they count."""

    @model_validator(mode="after")
    def _check(self) -> OverlongConfig:
        if self.buffer_tokens is None and "penalty" in self.model_fields_set and self.penalty != 1.0:
            raise ValueError(
                f"penalty = {self.penalty} has no effect without buffer_tokens, over which the reward falls; give both"
            )
        return self
