"""Names that stand for several keys of `algo`, and settings of it that contradict each other. Not covered: what is set
and not read (tests/planning/test_unused_keys.py), the arithmetic (tests/algo)."""

import pytest
from pydantic import ValidationError

from megarlhf.config import AlgoConfig, dump_config
from tests.refuses import refuses


def algo(**keys):
    return AlgoConfig.model_validate(keys)


@pytest.mark.parametrize("keys, expected", [
    ({"advantage": "grpo"}, {"advantage": "group_relative", "scale_by_group_std": True}),
    ({"advantage": "dr_grpo"}, {"advantage": "group_relative", "scale_by_group_std": False}),
    ({"advantage": "rloo"}, {"advantage": "leave_one_out"}),
    ({"advantage": "reinforce++"}, {"advantage": "reinforce_plus_plus", "whitens": True}),
    ({"advantage": "reinforce++_baseline"}, {"advantage": "reinforce_plus_plus_baseline", "whitens": True}),
    ({"advantage": "reinforce"}, {"whitens": False}),
    ({"advantage": "reinforce", "whiten_advantages": True}, {"whitens": True}),
    ({"advantage": "gae", "whiten_advantages": False}, {"whitens": False}),
    ({"policy_loss": "gspo"},
     {"policy_loss": "clip", "ratio": "geometric", "loss_average": "sequence", "clip_low": 3e-4}),
    ({"policy_loss": "gspo", "clip_low": 0.1, "loss_average": "token"}, {"clip_low": 0.1, "loss_average": "token"}),
    ({"policy_loss": "cispo"}, {"policy_loss": "cispo", "clip_low": None, "clip_high": 4.0}),
    ({"policy_loss": "cispo", "clip_high": 1.0}, {"clip_low": None, "clip_high": 1.0}),
])  # fmt: skip
def test_names_that_stand_for_several_keys(keys, expected):
    """What stands beside the name wins; the resolved file says the keys and is read as the same."""
    made = algo(**keys)
    assert {name: getattr(made, name) for name in expected} == expected
    assert AlgoConfig.model_validate(made.model_dump()) == made
    assert "gspo" not in dump_config(made)


@pytest.mark.parametrize("keys, names", [
    ({"advantage": "grop"}, "advantage = 'grop'|'grpo'|gae"),
    ({"advantage": "mt_grpo"}, "advantage = 'mt_grpo'|index|biased|group_relative"),
    ({"policy_loss": "gsop"}, "policy_loss = 'gsop'|'gspo'|clip"),
    ({"policy_loss": "dpo "}, "policy_loss = 'dpo '"),
    ({"advantage": "dr_grpo", "scale_by_group_std": True}, "scale_by_group_std = False|scale_by_group_std = True"),
    ({"policy_loss": "gspo", "ratio": "token"}, "'gspo'|ratio = geometric|ratio = token"),
    ({"clip_low": 1.5}, "clip_low = 1.5|-0.5"), ({"clip_delta": 1.1}, "clip_delta = 1.1|clip_high = 1.2"),
    ({"clip_dual": 1.0}, "clip_dual|greater than 1"),
    ({"kl": {"coef": 0.1, "placement": "loss", "estimator": "abs"}}, "abs in the loss|no divergence"),
    ({"kl": {"controller": "adaptive", "target": 0.1}}, "target = 0.1|coef = 0.0|above 0"),
    ({"kl": {"controller": "adaptive", "coef": 0.1}}, "target = None|coef = 0.1"),
    ({"kl": {"coef": 0.1, "target": 0.1}}, "target = 0.1|controller 'fixed'"),
    ({"kl": {"coef": 0.1, "ratio_weighted": True}}, "placement = 'reward'|coef = 0.1|placement: loss"),
    ({"kl": {"coef": 0.1, "placement": "loss", "estimator": "abs", "ratio_weighted": True}},
     "abs in the loss|no divergence"),
    ({"kl": {"coef": 0.1, "placement": "loss", "estimator": "k2", "ratio_weighted": True}},
     "k2 weighted|no divergence"),
    ({"rollout_correction": {"kind": "truncate", "high": 0.1}}, "high = 0.1|truncates"),
    ({"rollout_correction": {"kind": "mask", "low": 1.5}}, "low = 1.5|high = 2.0"),
])  # fmt: skip
def test_what_contradicts_itself_is_refused(keys, names):
    with refuses(*names.split("|"), error=ValidationError):
        algo(**keys)


def test_k1_in_the_loss_is_of_use_with_the_ratio_s_weight():
    assert algo(kl={"coef": 0.1, "placement": "loss", "estimator": "k1", "ratio_weighted": True}).kl_in_loss


def test_a_misspelt_loss_lists_each_known_one_once():
    with pytest.raises(ValidationError) as raised:
        algo(policy_loss="gsop")
    assert str(raised.value).count("cispo") == 1


def test_the_entropy_s_coefficient_goes_in_equal_steps():
    """Of .1 to .5 in five steps; a run that is prolonged by accident stays at the last. A run of one step has the
    first."""
    made = algo(entropy_coef=0.1, entropy_coef_end=0.5)
    assert [made.entropy_coef_at(step, 5) for step in range(6)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.5])
    assert made.entropy_coef_at(0, 1) == 0.1
    assert algo(entropy_coef=0.1).entropy_coef_at(3, 5) == 0.1
