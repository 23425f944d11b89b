"""Configuration of `megarlhf dpo`: preference optimisation on pairs of responses."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from megarlhf.config.choices import check_choices
from megarlhf.config.commands import EvalConfig, TrainConfig
from megarlhf.config.data import DataConfig
from megarlhf.config.observe import ObserveConfig
from megarlhf.config.profile import ProfileConfig, check_profile_steps
from megarlhf.config.roles import FrozenModel, NonNegative, Positive, RoleConfig, require_all_ranks
from megarlhf.config.run import CheckpointConfig, RunConfig
from megarlhf.config.shared_base import is_base_of, reference_section
from megarlhf.config.watchdog import WatchdogConfig

WITH_REFERENCE = ("dpo", "ipo", "kto")
"""Losses that compare the policy with a reference."""

_READ_BY = {
    "label_smoothing": ("dpo", "simpo"),
    "simpo_margin": ("simpo",),
    "ipo_length_normalised": ("ipo",),
    "kto_desirable_weight": ("kto",),
    "kto_undesirable_weight": ("kto",),
    "reference": WITH_REFERENCE,
}
"""Losses that read a key. Keys that are not listed are read by all losses."""


class DPOConfig(FrozenModel):
    command: ClassVar[str] = "dpo"

    run: RunConfig
    actor: RoleConfig
    reference: RoleConfig | None = None
    """Frozen reference for `dpo`, `ipo` and `kto`; not built for other losses. Default: the actor's model and
    layout."""
    data: DataConfig
    train: TrainConfig
    loss: Literal["dpo", "ipo", "simpo", "orpo", "kto"] = "dpo"
    """`dpo`: log-sigmoid of the margin of implicit rewards (Rafailov et al. 2023). `ipo`: squared distance of the
    margin to 1 / (2 `beta`) (Azar et al. 2023). `simpo`: mean log-probs and a target margin (Meng et al. 2024).
    `orpo`: odds ratio in addition to the likelihood of the chosen response (Hong et al. 2024). `kto`: each response of
    a pair compared with a reference point (Ethayarajh et al. 2024)."""
    beta: Positive | None = None
    """Scale of the implicit rewards; for `ipo` the paper's tau, for `orpo` the weight of the odds ratio (lambda).
    Default: 2.0 for `simpo`, 0.1 for the others."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
    """Share of pairs whose label is assumed to be wrong (cDPO). Read by `dpo` and `simpo`."""
    simpo_margin: NonNegative = 0.5
    """Target margin (gamma) of beta times the mean log-prob, from the rejected to the chosen response."""
    ipo_length_normalised: bool = False
    """Divide each response's log-ratio by its number of tokens, like TRL; false: like the paper."""
    kto_desirable_weight: Positive = 1.0
    """Weight of the chosen responses."""
    kto_undesirable_weight: Positive = 1.0
    """Weight of the rejected responses."""
    sft_coef: NonNegative | None = None
    """Weight of the negative log-likelihood of the chosen response, which is added to the loss (RPO, Pang et al. 2024).
    Default: 1 for `orpo`, which contains it, 0 for the others."""
    sft_average: Literal["sequence", "token"] = "sequence"
    """Average of that likelihood. `sequence`: over the tokens of each chosen response, then over pairs, as in the
    papers. `token`: over all chosen tokens of the mini-batch, as in TRL."""
    eval: EvalConfig = EvalConfig()
    observe: ObserveConfig = ObserveConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    profile: ProfileConfig = ProfileConfig()

    _profiled = model_validator(mode="after")(check_profile_steps)

    @property
    def needs_reference(self) -> bool:
        return self.loss in WITH_REFERENCE

    @property
    def scale(self) -> float:
        """`beta`, or its default."""
        return self.beta if self.beta is not None else {"simpo": 2.0}.get(self.loss, 0.1)

    @property
    def sft_weight(self) -> float:
        """`sft_coef`, or its default."""
        return self.sft_coef if self.sft_coef is not None else {"orpo": 1.0}.get(self.loss, 0.0)

    def describe_loss(self) -> str:
        """The loss with the defaults that depend on it, for the table that a start prints."""
        sft = f"; sft_coef = {self.sft_weight:g}, averaged by {self.sft_average}" if self.sft_weight else ""
        return f"loss = {self.loss}: beta = {self.scale:g}{sft}"

    def roles(self) -> dict[str, RoleConfig]:
        """The roles that this run builds."""
        roles = {"actor": self.actor}
        reference = reference_section(self.actor, self.reference)
        return {**roles, "reference": reference} if self.needs_reference else roles

    @property
    def reference_is_base(self) -> bool:
        """Whether the reference is the actor with its adapter switched off."""
        return self.needs_reference and is_base_of(self.actor, self.reference)

    @model_validator(mode="after")
    def _check(self) -> DPOConfig:
        for key, losses in _READ_BY.items():
            if self.loss not in losses and self.changed(key):
                raise ValueError(
                    f"{key} is given, and loss = {self.loss!r} does not read it; remove it, or choose the loss "
                    f"{' or '.join(map(repr, losses))}"
                )
        if self.sft_weight == 0 and self.changed("sft_average"):
            raise ValueError(
                f"sft_average = {self.sft_average!r}, but sft_coef = 0 adds no likelihood; set sft_coef, or remove it"
            )
        self.data.require_no_cut("dpo")
        require_all_ranks({"actor": self.actor})
        for name, role in self.roles().items():
            if role.model.fresh_head:
                raise ValueError(f"{name}.model.fresh_head: a language model has no scalar head; leave it out")
        check_choices(self)
        if self.loss == "kto":
            self._check_mismatches()
        return self

    def _check_mismatches(self) -> None:
        """Raises: ValueError if `kto` has no other pair to take a response from."""
        for key, samples in (
            ("train.mini_batch_samples", self.train.mini_batch_samples),
            ("eval.max_samples", self.eval.max_samples if self.data.has_validation else None),
        ):
            if samples == 1:
                raise ValueError(
                    f"{key} = 1, and loss = 'kto' measures its reference point on each prompt with the responses of "
                    "another pair; give 2 or more"
                )
