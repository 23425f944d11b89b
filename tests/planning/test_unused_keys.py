"""Keys of a configuration that are set and that nothing reads, and what is rarely meant: a dry run says so."""

import pytest

from megarlhf.config import EvaluateConfig, GenerateConfig, SFTConfig
from megarlhf.planning.preflight import preflight
from megarlhf.planning.unused_keys import rarely_meant, without_effect
from tests.planning.configs import rl, role, sft
from tests.refuses import missing_names


def test_what_is_set_and_has_no_effect_is_said(paths):
    """By key, each with the reason; a value that is the default is not set to anything."""

    def keys(command, cfg):
        start = "set, but without effect here: "
        notes = [note for note in preflight(command, cfg, 1).notes if note.startswith(start)]
        assert all("(" in note for note in notes)
        return {note.removeprefix(start).split(" (")[0] for note in notes}

    tree = sft(paths).model_dump() | {"eval": {"every": 2, "max_samples": 3}, "checkpoint": {"export_keep": 2}}
    assert keys("sft", SFTConfig.model_validate(tree)) == {"eval.every", "eval.max_samples", "checkpoint.export_keep"}
    tree |= {"data": {"train": paths["train"], "validation": paths["train"]}}
    tree["checkpoint"] = {"export_keep": 2, "export_every": 1}
    assert keys("sft", SFTConfig.model_validate(tree)) == set()
    grpo = {"advantage": "group_relative", "gamma": 0.9, "lam": 0.95, "value_clip": 0.1, "whiten_advantages": False}
    assert keys("rl", rl(paths, algo=grpo, rollout={"poison_weights": True, "balance": "length"})) == {
        "algo.gamma", "algo.value_clip", "critic", "rollout.balance", "rollout.poison_weights",
    }  # fmt: skip
    gae = {**grpo, "advantage": "gae", "scale_by_group_std": False}
    others = {"reward_model": role(paths), "critic": role(paths) | {"kernels": {"save_mib": 1}}}
    assert keys("rl", rl(paths, algo=gae, **others)) == {"algo.scale_by_group_std", "reward_model", "critic.kernels"}
    sapo = {
        "advantage": "dr_grpo", "group_std_eps": 0.1, "policy_loss": "sapo", "clip_low": 0.1, "clip_dual": 3.0,
        "loss_constant": 5, "loss_block_samples": 2, "kl": {"horizon": 5, "coef": 0.1},
        "rollout_correction": {"level": "sequence", "low": 0.1}, "whiten_variance": "unbiased",
    }  # fmt: skip
    assert keys("rl", rl(paths, algo=sapo)) == {
        *(f"algo.{name}" for name in ("group_std_eps", "clip_low", "clip_dual", "loss_constant", "loss_block_samples")),
        *(f"algo.{name}" for name in ("kl.horizon", "rollout_correction.level", "rollout_correction.low")),
        "algo.whiten_variance", "critic",
    }  # fmt: skip
    read = sapo | {"advantage": "grpo", "policy_loss": "clip", "loss_average": "constant", "whiten_advantages": True}
    read |= {"rollout_correction": {"kind": "mask", "level": "sequence"}, "kl": {}, "loss_block_samples": 1}
    assert keys("rl", rl(paths, algo=read)) == {"critic"}
    once = {"epochs_per_step": 1, "mini_batch_samples": 24}
    few = {"advantage": "grpo", "loss_counts_left_out": True}
    few["rollout_correction"] = {"kind": "mask", "level": "token", "mask_weight": "token"}
    assert keys("rl", rl(paths, algo=few, train={"max_policy_kl": 0.1})) == {
        "algo.loss_counts_left_out", "algo.rollout_correction.mask_weight", "critic",
    }  # fmt: skip
    few |= {"loss_average": "sequence"}
    assert keys("rl", rl(paths, algo=few, train={"max_policy_kl": 0.1, **once})) == {
        "train.max_policy_kl", "algo.rollout_correction.mask_weight", "critic",
    }  # fmt: skip
    tree = {
        "run": {"dir": "r"}, "actor": role(paths) | {"optim": {"lr": 0.5}},
        "data": {"train": paths["train"], "max_prompt_tokens": 8},
        "rollout": {"engine": "megatron", "max_response_tokens": 8, "temperature": 0.5},
    }  # fmt: skip
    assert keys("generate", GenerateConfig.model_validate(tree)) == {"actor.optim", "rollout.temperature"}
    assert keys("generate", GenerateConfig.model_validate(tree | {"greedy": False})) == {"actor.optim"}


def test_a_default_of_a_section_is_not_set(paths):
    """`eval` gives `forward` 16 samples, where other commands have no default: only the file sets a key."""
    rule = {"rewards": [{"kind": "rule", "rule": "exact_match"}], "rollout": {"engine": "vllm"}}
    tree = {"run": {"dir": "r"}, "actor": role(paths), "data": {"train": paths["train"]}, **rule}

    def forward_keys(**changes):
        notes = without_effect(EvaluateConfig.model_validate(tree | changes))
        return [note.partition(": ")[2].partition(" ")[0] for note in notes if "forward." in note]

    assert forward_keys() == []
    assert forward_keys(forward={"micro_batch_samples": 16}) == [], "set to its default"
    assert forward_keys(forward={"micro_batch_samples": 8}) == ["forward.micro_batch_samples"]
    assert forward_keys(forward={"max_tokens_per_micro_batch": 64}) == ["forward.max_tokens_per_micro_batch"]
    resolved = EvaluateConfig.model_validate(tree).model_dump()
    assert forward_keys(**{key: value for key, value in resolved.items() if key not in tree}) == []


@pytest.mark.parametrize("world_size, told", [(1, False), (2, True), (4, False), (None, False)])
def test_one_engine_has_nobody_to_share_with(paths, world_size, told):
    """Engines of two ranks; one rank makes none, which is refused elsewhere."""
    cfg = rl(paths, rollout={"engine": "vllm", "parallel": {"tp": 2}, "balance": "length"})
    notes = [note for note in without_effect(cfg, world_size) if "rollout.balance" in note]
    assert len(notes) == told
    assert all(not missing_names(note, "rollout.balance", "rollout.parallel.tp = 2", "one engine") for note in notes)


def test_what_is_rarely_meant_is_said(paths):
    """Groups that are dropped where nothing is compared within them; a loss of fresh samples for several updates."""

    def notes(algo, **train):
        cfg = rl(paths, algo=algo, train=train)
        assert set(rarely_meant(cfg)) <= set(preflight("rl", cfg, 1).notes)
        return rarely_meant(cfg)

    one = {"epochs_per_step": 1, "mini_batch_samples": 24}
    dynamic = {"dynamic_sampling": {"max_refills": 1}}
    (note,) = notes(dynamic | {"advantage": "gae"})
    assert "algo.advantage = gae" in note
    assert notes(dynamic | {"advantage": "grpo"}) == []
    (note,) = notes({"policy_loss": "policy_gradient"})
    assert "9 updates" in note
    assert notes({"policy_loss": "policy_gradient"}, **one) == []


def test_a_key_that_is_unread_for_two_reasons_is_told_once(paths):
    cfg = GenerateConfig.model_validate({
        "run": {"dir": "r"}, "actor": role(paths), "data": {"train": paths["train"], "max_prompt_tokens": 8},
        "rollout": {"engine": "megatron", "max_response_tokens": 8, "verify_weights_every": 3},
    })  # fmt: skip
    assert sum("rollout.verify_weights_every" in note for note in without_effect(cfg)) == 1
