"""How many samples, micro-batches and steps a configuration means on so many ranks; what does not divide is refused.
Not covered: memory and time (no such plan yet)."""

import pytest
import yaml
from pydantic import ValidationError

from megarlhf.config import DPOConfig, RMConfig, SFTConfig, config_of, dump_config
from megarlhf.config.load import dump_changed
from megarlhf.planning.batch import BatchNumber, require_prompts, rl_batch_numbers, schedule_notes, with_counted_steps
from megarlhf.planning.preflight import preflight
from tests.planning.configs import TRAIN, rl, role, sft
from tests.refuses import missing_names, refuses


def test_the_arithmetic_of_sft_by_hand(paths):
    """8 sequences on 2 data-parallel ranks are 4 each, in 2 micro-batches of 2."""
    plan = preflight("sft", sft(paths, parallel={"tp": 2}), 4)
    assert plan.numbers == (
        BatchNumber("optimizer steps of the run", 10),
        BatchNumber("sequences per optimizer step (mini-batch), over all ranks", 8),
        BatchNumber("data-parallel ranks of actor", 2),
        BatchNumber("sequences per optimizer step on one data-parallel rank", 4),
        BatchNumber("sequences per forward (micro-batch) of one data-parallel rank", 2),
        BatchNumber("micro-batches per optimizer step on one data-parallel rank", 2),
    )
    model = f"{paths['model']} (llama, 6 layers of 96, fp32 by default)"
    assert plan.roles == (("actor", model, "tp 2 x pp 1 x dp 2 = 4 ranks"),)


def test_the_arithmetic_of_rm_counts_pairs(paths):
    tree = {"run": {"dir": "r"}, "reward_model": role(paths, pp=2), "data": {"train": paths["train"]}, "train": TRAIN}
    plan = preflight("rm", RMConfig.model_validate(tree), 4)
    numbers = {number.unit: number.value for number in plan.numbers}
    assert numbers["data-parallel ranks of reward_model"] == 2
    assert numbers["preference pairs (two sequences each) per optimizer step on one data-parallel rank"] == 4
    assert numbers["micro-batches per optimizer step on one data-parallel rank"] == 2


def test_the_arithmetic_of_dpo_counts_pairs_and_passes_of_the_reference(paths):
    """4 ranks: the actor has 2 data-parallel ranks of 4 pairs each, the reference 4 of 2, one micro-batch of 2."""
    tree = {"run": {"dir": "r"}, "actor": role(paths, tp=2), "data": {"train": paths["train"]}, "train": TRAIN}
    plan = preflight("dpo", DPOConfig.model_validate({**tree, "reference": role(paths), "loss": "kto"}), 4)
    numbers = {number.unit: number.value for number in plan.numbers}
    assert numbers["data-parallel ranks of actor"] == 2
    assert numbers["preference pairs (two sequences each) per optimizer step on one data-parallel rank"] == 4
    assert numbers["passes of the frozen reference over the pairs of an optimizer step"] == 2
    assert numbers["micro-batches of each on one of reference's 4 data-parallel ranks"] == 1
    assert any(not missing_names(note, "loss = kto", "beta = 0.1") for note in plan.notes)
    assert [name for name, *_ in plan.roles] == ["actor", "reference"]
    plan = preflight("dpo", DPOConfig.model_validate({**tree, "loss": "orpo"}), 4)
    assert not any("frozen reference" in number.unit for number in plan.numbers)
    assert any(not missing_names(note, "loss = orpo", "beta = 0.1", "sft_coef = 1", "sequence") for note in plan.notes)
    large = {**tree, "reference": role(paths), "train": {**TRAIN, "micro_batch_samples": 4}}
    with refuses("reference", "train.micro_batch_samples = 4 x 4"):
        preflight("dpo", DPOConfig.model_validate(large), 4)


def test_the_arithmetic_of_rl_by_hand_with_a_layout_of_each_role(paths):
    """6 prompts x 4 samples = 24 samples = 3 mini-batches of 8; actor and reference dp 2, critic dp 4."""
    actor = role(paths, model=paths["make"]("wide", head_dim=32), tp=2)
    rollout = {"engine": "vllm", "parallel": {"tp": 2}}
    cfg = rl(paths, actor=actor, critic=role(paths), rollout=rollout, algo={"kl": {"log": True}})
    assert rl_batch_numbers(cfg, 4) == [
        BatchNumber("rollout-and-train steps of the run", 10),
        BatchNumber("prompts per step, over all ranks", 6),
        BatchNumber("samples per prompt", 4),
        BatchNumber("samples (sequences) per step, over all ranks", 24),
        BatchNumber("passes over the samples of a step", 3),
        BatchNumber("samples per optimizer step (mini-batch), over all ranks", 8),
        BatchNumber("optimizer steps per rollout-and-train step", 9),
        BatchNumber("samples per forward (micro-batch) of one data-parallel rank", 2),
        BatchNumber("micro-batches per mini-batch on one of actor's 2 data-parallel ranks", 2),
        BatchNumber("micro-batches per mini-batch on one of reference's 2 data-parallel ranks", 2),
        BatchNumber("micro-batches per mini-batch on one of critic's 4 data-parallel ranks", 1),
        BatchNumber("rollout engines of 2 rank(s)", 2),
        BatchNumber("prompts per rollout engine and step, at most", 3),
    ]
    assert preflight("rl", cfg, 4).numbers == tuple(rl_batch_numbers(cfg, 4))


def test_a_surplus_of_dynamic_sampling_is_counted_where_it_is_drawn(paths):
    """6 + 3 prompts x 4 samples = 36 are drawn, 24 are trained on; two engines draw from 5 prompts or fewer."""
    plain, surplus = (rl(paths, algo={"dynamic_sampling": {"surplus": number}}) for number in (0, 3))
    without, numbers = (rl_batch_numbers(cfg, 2) for cfg in (plain, surplus))
    assert [number for number in numbers if number not in without] == [
        BatchNumber("further prompts drawn per step (algo.dynamic_sampling.surplus)", 3),
        BatchNumber("samples drawn per step, over all ranks", 36),
        BatchNumber("prompts per rollout engine and step, at most", 5),
    ]
    assert BatchNumber("samples (sequences) per step, over all ranks", 24) in numbers
    require_prompts(surplus, 9)
    with refuses("train.prompts_per_step + algo.dynamic_sampling.surplus = 6 + 3", "9 different", "has 8"):
        require_prompts(surplus, 8)


def test_a_warm_up_longer_than_the_run_is_refused(paths):
    """10 steps of 3 mini-batches and 3 passes: 90 updates of the critic; the actor's begin after the critic's own."""
    cfg = sft(paths)
    late = cfg.actor.model_copy(update={"optim": cfg.actor.optim.model_copy(update={"warmup_steps": 11})})
    assert not any("warmup" in note for note in preflight("sft", cfg, 1).notes)
    with refuses("actor.optim.warmup_steps = 11", "10 optimizer steps", "at most 10"):
        preflight("sft", cfg.model_copy(update={"actor": late}), 1)
    slow = {**role(paths), "optim": {"warmup_steps": 90}}
    assert schedule_notes(rl(paths, actor=slow, critic=slow)) == []
    with refuses("actor.optim.warmup_steps = 90", "54 optimizer steps of actor"):
        schedule_notes(rl(paths, actor=slow, critic=slow, train={"critic_warmup_steps": 4}))
    (note,) = schedule_notes(rl(paths, train={"critic_warmup_steps": 10}))
    assert missing_names(note, "actor", "train.critic_warmup_steps = 10", "train.num_steps = 10") == []


PER_RANK = "train.micro_batch_samples"


@pytest.mark.parametrize("change, world, names", [
    ({"train": {"mini_batch_samples": 10}}, 1,
     ("train.prompts_per_step x rollout.num_samples_per_prompt = 6 x 4 = 24", "mini_batch_samples = 10", "20 or 30")),
    ({"train": {"mini_batch_samples": 6, "micro_batch_samples": 2}}, 2,
     ("train.mini_batch_samples = 6", f"actor x {PER_RANK} = 2 x 2 = 4", "4 or 8", "actor.parallel")),
    ({"actor": {"tp": 4}, "train": {"micro_batch_samples": 4}}, 4,
     ("train.mini_batch_samples = 8", f"critic x {PER_RANK} = 4 x 4 = 16", "use 16", "critic.parallel")),
    ({"rollout": {"engine": "vllm", "parallel": {"tp": 3}}}, 4, ("4 ranks", "rollout.parallel.tp = 3")),
])  # fmt: skip
def test_what_does_not_divide_names_numbers_and_keys(paths, change, world, names):
    if "actor" in change:
        change = {**change, "actor": role(paths, **change["actor"])}
    with refuses(*names):
        rl_batch_numbers(rl(paths, **change), world)


def epochs_of(paths, **train):
    tree = {"run": {"dir": "r"}, "actor": {**role(paths), "optim": {"lr": 1e-3, "warmup_steps": 20}}}
    train = {"mini_batch_samples": 16, "micro_batch_samples": 1, **train}
    return SFTConfig.model_validate({**tree, "data": {"train": paths["train"]}, "train": train})


@pytest.mark.parametrize(("epochs", "steps"), [(1, 25), (0.9, 23), (2.0, 50), (0.96, 24)])
def test_epochs_are_counted_in_steps(paths, epochs, steps):
    """Of 16 of 400 records, the last step rounded up."""
    cfg = epochs_of(paths, num_epochs=epochs)
    assert preflight("sft", cfg, 1).numbers[0] == BatchNumber("passes over the data of the run", epochs)
    assert "num_steps" not in dump_config(cfg) + dump_changed(cfg)
    counted = with_counted_steps(cfg, 400, 16)
    assert (counted.train.num_steps, counted.train.num_epochs) == (steps, None)
    assert with_counted_steps(counted, 7, 16) is counted
    assert config_of(SFTConfig, yaml.safe_load(dump_config(cfg))) == cfg


def test_epochs_contradict_steps_and_are_checked_when_they_are_counted(paths):
    with refuses("num_steps = 3", "num_epochs = 2", error=ValidationError):
        epochs_of(paths, num_epochs=2, num_steps=3)
    with refuses("actor.optim.warmup_steps = 20", "13 optimizer steps"):
        with_counted_steps(epochs_of(paths, num_epochs=0.5), 400, 16)
