"""Refusals of a configuration, key by key and across keys: each names the key, the value and the remedy. Not covered:
arithmetic over ranks (tests/planning)."""

from typing import get_args

import pytest

from megarlhf.config import KernelsConfig
from megarlhf.kernels import Backend
from tests.config.examples import KINDS
from tests.refuses import missing_names, refuses

EVALUATED = ["eval.every=1", "data.validation=h.jsonl"]


@pytest.mark.parametrize("command, override, unknown, known", [
    ("sft", "trian.num_steps=3", "trian", "'train'"),
    ("sft", "actor.optim.learning_rte=3", "actor.optim.learning_rte", "beta1|beta2|clip_grad|distributed|eps|lr"),
    ("sft", "actor.optim.warmup_step=3", "actor.optim.warmup_step", "'warmup_steps'"),
    ("sft", "train.micro_batch_sample=3", "train.micro_batch_sample", "'micro_batch_samples'"),
    ("rl", "algo.kl.coeff=3", "algo.kl.coeff", "'coef'"),
    ("rl", "critic.parallel.tpp=3", "critic.parallel.tpp", "'tp'"),
    ("rl", "rewards=[{kind: rule, rule: x, wieght: 2}]", "rewards.0.wieght", "'weight'"),
    ("generate", "gredy=true", "gredy", "'greedy'"),
    ("rl", "data.max_response_tokens=3", "data.max_response_tokens", "'rollout.max_response_tokens'"),
    ("rl", "weight=3", "weight", "'rewards.weight'|'ptx.data.weight'"),
    ("rl", "environment.tools=[{python: {second: 5}}]", "environment.tools.0.python.second", "'seconds'"),
    ("rl", "train.every=3", "train.every", "'eval.every'|'samples.every'|'checkpoint.every'"),
])  # fmt: skip
def test_an_unknown_key_names_the_nearest_known_one_of_its_section(refusal, command, override, unknown, known):
    assert not missing_names(refusal(command, override), f"unknown key '{unknown}'", *known.split("|"))


@pytest.mark.parametrize("command, key", [
    ("sft", "run"), ("sft", "train.num_steps"), ("rm", "reward_model"), ("rl", "rewards"), ("rl", "critic.model"),
])  # fmt: skip
def test_a_missing_key_is_named(refusal, command, key):
    section, _, name = key.rpartition(".")
    message = refusal(command, change=lambda tree: (tree[section] if section else tree).pop(name))
    instead = " or 'train.num_epochs'" if key == "train.num_steps" else ""
    assert message.endswith(f": missing key '{key}'{instead}"), message


@pytest.mark.parametrize("override, words", [
    ("train.num_steps=many", ["train.num_steps: ", "valid integer", "got 'many'"]),
    ("train.num_steps=2.5", ["train.num_steps: ", "valid integer", "got 2.5"]),
    ("train.mini_batch_samples=0", ["train.mini_batch_samples: ", "greater than 0", "got 0"]),
    ("actor.parallel.sequence_parallel=perhaps", ["actor.parallel.sequence_parallel: ", "got 'perhaps'"]),
    ("actor.parallel.tp=[1]", ["actor.parallel.tp: ", "got [1]"]),
    ("actor.model.dtype=fp8", ["actor.model.dtype: ", "'fp32' or 'bf16'", "got 'fp8'"]),
    ("actor.optim.beta1=1.5", ["actor.optim.beta1: ", "less than 1", "got 1.5"]),
    ("actor.optim.beta2=1", ["actor.optim.beta2: ", "less than 1", "got 1"]),
    ("run.on_existing=ignore", ["run.on_existing: ", "'resume', 'refuse' or 'overwrite'", "got 'ignore'"]),
    ("run.seed=-1", ["run.seed: ", "greater than or equal to 0", "got -1"]),
    ("actor.optim.lr=.nan", ["actor.optim.lr: ", "finite number", "got nan"]),
    ("actor.optim.lr=.inf", ["actor.optim.lr: ", "finite number", "got inf"]),
    ("actor.optim.lr=yes", ["actor.optim.lr: ", "valid number", "got 'yes'"]),
    ("train.num_steps=true", ["train.num_steps: ", "valid integer", "got 'true'"]),
    ("train.num_steps=1:30", ["train.num_steps: ", "valid integer", "got '1:30'"]),
    ("actor.parallel={pp: 2, layers_per_stage: [true, 1]}", ["layers_per_stage.0: ", "valid integer", "'true'"]),
    ("run.dir=~nobody-of-this-name/x", ["run.dir: ", "write the whole path"]),
    ("train=3", ["train: ", "got 3"]), ("run=", ["run: ", "got None"]),
])  # fmt: skip
def test_a_value_of_the_wrong_type_or_range_says_key_rule_and_value(refusal, override, words):
    message = refusal("sft", override)
    assert [word for word in words if word not in message] == [], message


def test_every_mistake_is_said_at_once_one_a_line(refusal):
    lines = refusal("sft", "trian.x=1", "train.num_steps=many", "actor.optim.lr=0").splitlines()
    assert len(lines) == 3
    assert sum("unknown key 'trian'" in line for line in lines) == 1


def test_a_mistake_is_told_of_the_file_or_of_the_override_that_makes_it(refusal):
    message = refusal("sft", "trian.x=1", "actor.model={pth: x}", change=lambda tree: tree["run"].update(sed=1))
    of_file, *of_overrides = sorted(message.splitlines(), key=lambda line: "override" in line)
    assert not missing_names(of_file, "config.yaml", "unknown key 'run.sed'", "'seed'")
    model = "override 'actor.model={pth: x}'"
    for line, names in zip(sorted(of_overrides), (
        (model, "missing key 'actor.model.path'"), (model, "unknown key 'actor.model.pth'", "'path'"),
        ("override 'trian.x=1'", "unknown key 'trian'", "'train'"),
    ), strict=True):  # fmt: skip
        assert not missing_names(line, *names)


PACKED = ("train.micro_batch_samples=", "train.max_tokens_per_micro_batch=128")
VLLM_TP = ("actor.parallel.tp=2", "rollout.parallel.tp=2")
GROUP, PAIR = "rewards=[{kind: rule, rule: exact_match, normalise: group}]", "rollout.num_samples_per_prompt=2"
STOP = "train.stop.validation_reward_patience=2"
BEST = ("pairs_per_prompt=3", "select=best_and_worst", "greedy=false", "rewards=[{kind: rule, rule: exact_match}]")
REFUSED = [
    ("sft", ["data.train_split=a"], ("train_split", "train.jsonl")),
    ("sft", ["data.heldout=a.jsonl"], ("heldout", "validation")),
    ("rl", ["rollout.engine=megatron", "rollout.parallel.tp=2"], ("parallel.tp",)),
    ("generate", ["rollout={engine: megatron, vllm: {args: {a: 1}}}"], ("vllm.args",)),
    ("sft", ["profile.steps=[0]"], ("profile.steps.0",)),
    ("rl", ["profile.memory_snapshot=0"], ("profile.memory_snapshot",)),
    ("sft", ["profile.steps=[3, 5, 4]"], ("profile.steps", "4, 5", "train.num_steps = 3")),
    ("rm", ["profile.memory_snapshot=4"], ("profile.memory_snapshot", "train.num_steps = 3")),
    ("dpo", ["profile.steps=[4]"], ("profile.steps", "train.num_steps = 3")),
    ("rl", ["profile.steps=[1]", "train.num_steps=0"], ("profile.steps", "train.num_steps = 0")),
    ("rl", ["profile.ranks=[-1]"], ("profile.ranks.0",)), ("rl", ["profile.ranks=[]"], ("profile.ranks",)),
    ("generate", ["profile.steps=[1]"], ("'profile'",)), ("sft", ["run.world_size=0"], ("run.world_size",)),
    ("sft", ["train.num_steps=0"], ("train.num_steps",)), ("rm", ["train.num_steps=0"], ("train.num_steps",)),
    ("generate", ["rewards=[{kind: rule, rule: x}, {kind: rule, rule: x}]"], ("rewards", "x", "rewards[].name")),
    ("sft", ["actor.parallel.sequence_parallel=true"], ("actor.parallel", "sequence_parallel", "tp = 1")),
    ("sft", ["actor.parallel={pp: 3, layers_per_stage: [2, 2]}"], ("layers_per_stage", "pp = 3", "give 3")),
    ("sft", ["actor.parallel={pp: 2, vpp: 2, layers_per_stage: [2, 2]}"], ("layers_per_stage", "2 x 2 = 4", "give 4")),
    ("sft", ["actor.parallel.vpp=2"], ("actor.parallel", "vpp = 2", "pp = 1")),
    ("sft", ["actor.optim={lr: 1e-5, min_lr: 1e-4, schedule: cosine}"], ("min_lr = 0.0001", "lr = 1e-05")),
    ("sft", ["actor.optim.min_lr=1e-4"], ("min_lr = 0.0001", "'constant'", "'linear'")),
    ("rl", ["reward_model.model.fresh_head=true"], ("reward_model.model.fresh_head",)),
    ("rl", ["actor.model.fresh_head=true"], ("actor.model.fresh_head",)),
    ("rm", ["margin=true", "loss=aligned_span"], ("margin = true", "loss = aligned_span")),
    ("rm", ["unit_variance=true"], ("unit_variance", "data.validation")),
    ("rl", ["rewards=[{kind: rule}]"], ("rewards.0", "'rule'", "rule = None")),
    ("rl", ["rewards=[{kind: model, rule: x}]"], ("'model'", "rule = 'x'")),
    ("rl", ["train.shuffle=true"], ("train.shuffle", "true", "samples")),
    ("rl", ["train.shuffle=false"], ("train.shuffle", "false", "none")),
    ("rl", ["train.shuffle=group"], ("train.shuffle", "'group'", "'groups'")),
    ("rl", ["rewards=[]"], ("rewards", "exact_match")),
    ("rl", ["critic="], ("algo.advantage = 'gae'", "critic")),
    ("rl", ["reward_model="], ("rewards", "reward_model")),
    ("rl", ["algo.advantage=group_relative"], ("'group_relative'", "rollout.num_samples_per_prompt")),
    ("rl", ["algo.advantage=leave_one_out"], ("'leave_one_out'", "rollout.num_samples_per_prompt")),
    ("rl", ["algo.dynamic_sampling.max_refills=1"], ("algo.dynamic_sampling", "rollout.num_samples_per_prompt")),
    ("rl", ["algo.dynamic_sampling.surplus=1"], ("algo.dynamic_sampling", "rollout.num_samples_per_prompt")),
    ("rl", ["algo.dynamic_sampling.surplus=-1"], ("algo.dynamic_sampling.surplus",)),
    ("rl", ["algo.dynamic_sampling.surplus=1", "train.sampler=own.py:choose", PAIR],
     ("train.sampler", "algo.dynamic_sampling")),
    ("rl", [GROUP], ("rewards[0].normalise = group", "rollout.num_samples_per_prompt")),
    ("rl", ["algo.advantage=remax", GROUP, PAIR], ("rewards[0].normalise = group", "algo.advantage = 'remax'")),
    ("rl", ["algo.kl={coef: 0.1, controller: adaptive, target: 0.1, horizon: 1}"],
     ("algo.kl.horizon = 1", "-0.2 to 0.2")),
    ("rl", ["algo.overlong.buffer_tokens=4000"], ("buffer_tokens = 4000", "rollout.max_response_tokens")),
    ("rl", ["algo.overlong.penalty=2"], ("penalty = 2.0", "buffer_tokens")),
    ("rl", ["algo.dynamic_sampling.reward_range=[0, 1]"], ("reward_range", "max_refills = 0", "surplus = 0")),
    ("rl", ["algo.dynamic_sampling={max_refills: 1, reward_range: [1, 0]}"], ("reward_range", "1.0", "0.0")),
    ("rl", [STOP], ("train.stop.patience", "eval.every", "data.validation")),
    ("rl", [STOP, "eval.every=1", "data.validation="], ("train.stop.patience", "eval.every", "data.validation")),
    ("sft", ["train.stop.patience=2", "eval.every=1"], ("train.stop.patience", "data.validation")),
    ("sft", ["train.stop.metric=eval_loss"], ("train.stop", "metric", "patience")),
    ("sft", ["checkpoint.best={metric: eval_loss}"], ("checkpoint.best", "eval.every", "data.validation")),
    ("sft", ["checkpoint.best={}"], ("'checkpoint.best.metric'",)),
    ("sft", ["checkpoint.best={metric: eval_los}", *EVALUATED], ("'eval_los'", "'eval_loss'")),
    ("rm", ["checkpoint.best={metric: eval_accuracy}", *EVALUATED], ("eval_pair_accuracy",)),
    ("rl", ["checkpoint.best={metric: loss}", *EVALUATED], ("eval_reward_mean", "eval_accuracy")),
    ("rl", ["checkpoint.best={metric: test_accuracy}", *EVALUATED], ("'test_accuracy'", "'eval_accuracy'")),
    ("dpo", ["train.stop={patience: 1, metric: eval_chosen_logprob}", "eval.every=1"],
     ("train.stop.mode", "min", "max")),
    ("rm", ["checkpoint.best={metric: eval_loss}", "unit_variance=true", *EVALUATED], ("eval_pair_accuracy",)),
    ("rl", ["train.stop={validation_reward_patience: 2, metric: eval_accuracy}", *EVALUATED],
     ("validation_reward_patience", "eval_reward_mean")),
    ("rl", ["train.stop={validation_reward_patience: 2, patience: 3}", *EVALUATED],
     ("validation_reward_patience = 2", "patience = 3")),
    ("generate", ["data.validation=h.jsonl"], ("data.validation = h.jsonl", "data.train")),
    ("generate", ["data.test=h.jsonl"], ("data.test = h.jsonl", "data.train")),
    ("generate", ["rewards=[{kind: model}]"], ("'model'", "{kind: classifier, path: ...}")),
    ("generate", ["rewards=[{kind: rule, rule: x, weight: 2, clip: 1}]"],
     ("rewards[0].weight = 2.0", "rewards[0].clip = 1.0")),
    ("rl", ["ptx={data: t.jsonl}"], ("ptx", "train.max_tokens_per_micro_batch")),
    ("rl", [*PACKED, "ptx={data: t.jsonl, max_tokens: 200}"],
     ("ptx.max_tokens = 200", "train.max_tokens_per_micro_batch = 128")),
    ("rl", ["rollout.top_p=0.9"], ("rollout.top_p = 0.9",)),
    ("rl", ["rollout.top_k=5", "rollout.min_p=0.1"], ("rollout.top_k = 5", "rollout.min_p = 0.1")),
    ("generate", ["rollout.top_k=5"], ("rollout.top_k = 5", "greedy = true")),
    ("generate", ["select=best"], ("select = best", "0 rewards", "rollout.num_samples_per_prompt")),
    ("generate", ["min_reward=1"], ("min_reward = 1.0", "select = all")),
    ("generate", ["pairs_per_prompt=2"], ("pairs_per_prompt = 2", "select = all")),
    ("generate", [*BEST, "rollout.num_samples_per_prompt=5"], ("rollout.num_samples_per_prompt = 5", "6")),
    ("rl", ["rollout.balance=dynamic"], ("rollout.balance", "'on_demand'", "'length'", "'fixed'")),
    ("rl", ["rollout.stop=['']"], ("rollout.stop.0",)),
    ("generate", ["rollout.num_samples_per_prompt=4"], ("rollout.num_samples_per_prompt = 4", "greedy = true")),
    ("sft", ["train.max_tokens_per_micro_batch=64"], ("max_tokens_per_micro_batch = 64", "micro_batch_samples = 2")),
    ("rm", ["train.micro_batch_samples="], ("max_tokens_per_micro_batch = None", "micro_batch_samples = None")),
    ("rl", [*PACKED, "data.max_prompt_tokens=100", "rollout.max_response_tokens=29"],
     ("data.max_prompt_tokens + rollout.max_response_tokens = 129", "train.max_tokens_per_micro_batch = 128")),
]  # fmt: skip


@pytest.mark.parametrize(("command", "overrides", "names"), REFUSED)
def test_every_check_across_keys_names_keys_values_and_remedies(refusal, command, overrides, names):
    message = refusal(command, *overrides)
    assert not missing_names(message, *names), message


@pytest.mark.parametrize("command, overrides", [
    ("sft", ["actor.parallel.sequence_parallel=true", "actor.parallel.tp=2"]),
    ("sft", ["actor.parallel={pp: 3, layers_per_stage: [2, 2, 1]}"]),
    ("sft", ["actor.parallel={pp: 2, vpp: 2, layers_per_stage: [1, 2, 2, 1]}"]),
    ("rm", ["unit_variance=true", "data.validation=data/validation.jsonl"]),
    ("rl", ["rewards=[{kind: rule, rule: x}]", "reward_model="]),
    ("rl", ["algo.advantage=group_relative", "rollout.num_samples_per_prompt=2", "critic="]),
    ("rl", VLLM_TP), ("rl", ["critic.model.fresh_head=true"]),
    ("sft", ["actor.optim={lr: 1e-4, min_lr: 1e-4, schedule: linear}"]),
    ("rl", ["rollout.parallel.tp=", "rollout.vllm.args={}", "rollout.engine=megatron"]),
    ("sft", ["data.validation.split=test", "data.validation.path=data", "data.train_split="]),
    ("rl", ["train.stop.validation_reward_patience=2", "eval.every=1"]),
    ("generate", ["rewards=[{kind: rule, rule: exact_match}]"]),
    ("sft", PACKED),
    ("rl", [*PACKED, "data.max_prompt_tokens=100", "rollout.max_response_tokens=28"]),
])  # fmt: skip
def test_following_the_advice_is_accepted(load, command, overrides):
    """The neighbours of the refused cases, so that no check refuses everything."""
    assert isinstance(load(command, *overrides), KINDS[command][0])


def test_the_layout_of_a_world_that_does_not_divide_names_the_near_ones(load):
    parallel = load("sft", "actor.parallel={tp: 2, pp: 2}").actor.parallel
    assert (parallel.layout(12).dp, parallel.layout(12).world_size) == (3, 12)
    with refuses("actor.parallel", "world size 6", "2 x 1 x 2", "4 or 8 ranks", "run.nproc"):
        parallel.layout(6)
    with refuses("critic.parallel", "world size 2", "4 ranks", "run.nproc"):
        parallel.layout(2, "critic")


def test_the_kernels_section(load, refusal):
    """Its defaults, an override from the command line, one role's apart from another's, and what is refused. The names
    are those that the kernels know: config/ stands below them and cannot ask."""
    cfg = load("rl", "actor.kernels={logprobs: reference, save_mib: 0}")
    assert (cfg.actor.kernels.logprobs, cfg.actor.kernels.save_mib) == ("reference", 0)
    assert cfg.critic.kernels == KernelsConfig() == load("sft").actor.kernels
    assert (cfg.critic.kernels.logprobs, cfg.critic.kernels.save_mib) == ("auto", 256)
    assert get_args(KernelsConfig.model_fields["logprobs"].annotation) == get_args(Backend)
    assert "actor.kernels.save_mib" in refusal("sft", "actor.kernels.save_mib=-1")
    assert all(name in refusal("sft", "actor.kernels.logprobs=cuda") for name in get_args(Backend))
