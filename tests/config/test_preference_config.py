"""What a configuration of `dpo` may not say, and what follows from a loss. Not covered: keys that other commands have
too (test_refusals.py)."""

import pytest

from megarlhf.config import DPOConfig
from tests.config.examples import DPO
from tests.refuses import missing_names


@pytest.mark.parametrize("overrides, names", [
    (["loss=smpo"], "loss:|did you mean 'simpo'"), (["beta=0"], "beta:|greater than 0"),
    (["loss=simpo", "reference={model: {path: m}}"], "reference|'dpo'|'ipo'|'kto'"),
    (["loss=orpo", "reference={model: {path: m}}"], "reference|loss = 'orpo'"),
    (["label_smoothing=0.5"], "label_smoothing:|less than 0.5"),
    (["label_smoothing=-0.1"], "label_smoothing:|greater than or equal to 0"),
    (["loss=ipo", "label_smoothing=0.1"], "label_smoothing is given|'dpo'|'simpo'"),
    (["simpo_margin=1"], "simpo_margin is given|'simpo'"),
    (["ipo_length_normalised=true"], "ipo_length_normalised is given|'ipo'"),
    (["kto_undesirable_weight=2"], "kto_undesirable_weight is given|'kto'"),
    (["sft_average=token"], "sft_average = 'token'|sft_coef = 0"),
    (["loss=kto", "train.mini_batch_samples=1", "train.micro_batch_samples=1"], "train.mini_batch_samples = 1"),
    (["loss=kto", "eval.max_samples=1"], "eval.max_samples = 1|loss = 'kto'|2 or more"),
    (["actor.model.fresh_head=true"], "actor.model.fresh_head"), (["center_coef=1"], "unknown key 'center_coef'"),
])  # fmt: skip
def test_what_is_refused(refusal, overrides, names):
    assert not missing_names(refusal("dpo", *overrides), *names.split("|"))


@pytest.mark.parametrize("loss, roles, scale, sft_weight", [
    ("dpo", ["actor", "reference"], 0.1, 0.0), ("ipo", ["actor", "reference"], 0.1, 0.0),
    ("kto", ["actor", "reference"], 0.1, 0.0), ("simpo", ["actor"], 2.0, 0.0), ("orpo", ["actor"], 0.1, 1.0),
])  # fmt: skip
def test_what_follows_from_a_loss(loss, roles, scale, sft_weight):
    cfg = DPOConfig.model_validate({**DPO, "loss": loss})
    assert list(cfg.roles()) == roles
    assert all(role == cfg.actor for role in cfg.roles().values())
    assert (cfg.scale, cfg.sft_weight) == (scale, sft_weight)
    given = DPOConfig.model_validate({**DPO, "loss": loss, "beta": 0.7, "sft_coef": 0.3})
    assert (given.scale, given.sft_weight) == (0.7, 0.3)
    assert not missing_names(given.describe_loss(), loss, "beta = 0.7", "sft_coef = 0.3", "sequence")
