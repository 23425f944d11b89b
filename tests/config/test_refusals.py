"""What a configuration may not say, key by key and across keys, and what each mistake is told.

Not covered: arithmetic over ranks (tests/planning).
"""

from typing import get_args

import pytest

from megarlhf.config import KernelsConfig
from megarlhf.kernels import Backend
from tests.config.examples import KINDS

EVALUATED = ["eval.every=1", "data.validation=h.jsonl"]


@pytest.mark.parametrize(
    "command, override, unknown, hint",
    [
        ("sft", "trian.num_steps=3", "trian", "did you mean 'train'?"),
        (
            "sft",
            "actor.optim.learning_rte=3",
            "actor.optim.learning_rte",
            "known here: beta1, beta2, clip_grad, distributed, eps, lr,",
        ),
        ("sft", "actor.optim.warmup_step=3", "actor.optim.warmup_step", "did you mean 'warmup_steps'?"),
        ("sft", "train.micro_batch_sample=3", "train.micro_batch_sample", "did you mean 'micro_batch_samples'?"),
        ("rl", "algo.kl.coeff=3", "algo.kl.coeff", "did you mean 'coef'?"),
        ("rl", "critic.parallel.tpp=3", "critic.parallel.tpp", "did you mean 'tp'?"),
        ("rl", "rewards=[{kind: rule, rule: x, wieght: 2}]", "rewards.0.wieght", "did you mean 'weight'?"),
        ("generate", "gredy=true", "gredy", "did you mean 'greedy'?"),
        ("rl", "data.max_response_tokens=3", "data.max_response_tokens", "did you mean 'rollout.max_response_tokens'?"),
        ("rl", "weight=3", "weight", "did you mean 'rewards.weight' or 'ptx.data.weight' or 'data.train.weight'?"),
        ("rl", "train.every=3", "train.every", "did you mean 'eval.every' or 'samples.every' or 'checkpoint.every'?"),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one_of_its_section(refusal, command, override, unknown, hint):
    message = refusal(command, override)
    assert f"unknown key '{unknown}'; {hint}" in message


@pytest.mark.parametrize(
    "command, section, key, words",
    [
        ("sft", None, "run", "missing key 'run'"),
        ("sft", "train", "num_steps", "missing key 'train.num_steps'"),
        ("rm", None, "reward_model", "missing key 'reward_model'"),
        ("rl", None, "rewards", "missing key 'rewards'"),
        ("rl", "critic", "model", "missing key 'critic.model'"),
    ],
)
def test_a_missing_key_is_named(refusal, command, section, key, words):
    message = refusal(command, change=lambda tree: (tree[section] if section else tree).pop(key))
    assert message.endswith(": " + words), message


@pytest.mark.parametrize(
    "override, words",
    [
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
        ("train=3", ["train: ", "got 3"]),
        ("run=", ["run: ", "got None"]),
    ],
)
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
    assert "config.yaml: unknown key 'run.sed'; did you mean 'seed'?" in of_file
    assert sorted(of_overrides) == [
        "override 'actor.model={pth: x}': missing key 'actor.model.path'",
        "override 'actor.model={pth: x}': unknown key 'actor.model.pth'; did you mean 'path'?",
        "override 'trian.x=1': unknown key 'trian'; did you mean 'train'?",
    ]


@pytest.mark.parametrize(
    ("command", "overrides", "words"),
    [
        (
            "sft",
            ["data.train_split=a"],
            "train_split is now a part of train: write train: {path: data/train.jsonl, split: a}",
        ),
        ("sft", ["data.heldout=a.jsonl"], "data: heldout is now called validation; rename the key"),
        ("rl", ["rollout.engine=megatron", "rollout.parallel.tp=2"], "rollout: parallel.tp would have no effect"),
        ("generate", ["rollout={engine: megatron, engine_args: {a: 1}}"], "engine_args would have no effect"),
        ("sft", ["profile.steps=[0]"], "profile.steps.0: Input should be greater than 0, got 0"),
        ("rl", ["profile.memory_snapshot=0"], "profile.memory_snapshot: Input should be greater than 0, got 0"),
        ("sft", ["profile.steps=[3, 5, 4]"], "profile.steps names step 4, 5, and train.num_steps = 3"),
        ("rm", ["profile.memory_snapshot=4"], "profile.memory_snapshot names step 4, and train.num_steps = 3"),
        ("dpo", ["profile.steps=[4]"], "profile.steps names step 4, and train.num_steps = 3"),
        ("rl", ["profile.steps=[1]", "train.num_steps=0"], "profile.steps names step 1, and train.num_steps = 0"),
        ("rl", ["profile.ranks=[-1]"], "profile.ranks.0: Input should be greater than or equal to 0, got -1"),
        ("rl", ["profile.ranks=[]"], "profile.ranks: Tuple should have at least 1 item"),
        ("generate", ["profile.steps=[1]"], "unknown key 'profile'"),
        ("sft", ["run.world_size=0"], "run.world_size: Input should be greater than 0, got 0"),
        ("sft", ["train.num_steps=0"], "train.num_steps: Input should be greater than 0, got 0"),
        ("rm", ["train.num_steps=0"], "train.num_steps: Input should be greater than 0, got 0"),
        ("generate", ["rewards=[{kind: rule, rule: x}, {kind: rule, rule: x}]"], "rewards has x more than once"),
    ],
)
def test_what_could_have_no_effect_and_is_certainly_a_mistake_is_refused(refusal, command, overrides, words):
    assert words in refusal(command, *overrides)


PACKED = ("train.micro_batch_samples=", "train.max_tokens_per_micro_batch=128")
VLLM_TP = ("actor.parallel.tp=2", "rollout.parallel.tp=2")


@pytest.mark.parametrize(
    "command, overrides, words",
    [
        (
            "sft",
            ["actor.parallel.sequence_parallel=true"],
            ["actor.parallel: ", "sequence_parallel needs tp > 1", "got tp = 1", "set sequence_parallel to false"],
        ),
        (
            "sft",
            ["actor.parallel={pp: 3, layers_per_stage: [2, 2]}"],
            ["actor.parallel: ", "layers_per_stage has 2 numbers for pp = 3 stages; give 3"],
        ),
        (
            "sft",
            ["actor.parallel={pp: 2, vpp: 2, layers_per_stage: [2, 2]}"],
            ["actor.parallel: ", "layers_per_stage has 2 numbers for pp x vpp = 2 x 2 = 4 stages; give 4"],
        ),
        ("sft", ["actor.parallel.vpp=2"], ["actor.parallel: ", "vpp = 2 needs pp > 1, got pp = 1", "a larger pp"]),
        (
            "sft",
            ["actor.optim={lr: 1e-5, min_lr: 1e-4, schedule: cosine}"],
            ["actor.optim: ", "min_lr = 0.0001 is above lr = 1e-05", "lower min_lr or raise lr"],
        ),
        ("sft", ["actor.optim.min_lr=1e-4"], ["min_lr = 0.0001, but with schedule 'constant'", "to 'linear' or"]),
        ("rl", ["reward_model.model.fresh_head=true"], ["reward_model.model.fresh_head: only a critic", "fresh head"]),
        ("rl", ["actor.model.fresh_head=true"], ["actor.model.fresh_head: only a critic may"]),
        ("rm", ["margin=true", "loss=aligned_span"], ["margin = true is of one score", "loss = aligned_span"]),
        ("rm", ["unit_variance=true"], ["unit_variance measures the scores of held-out pairs", "set data.validation"]),
        ("rl", ["rewards=[{kind: rule}]"], ["rewards.0: ", "'rule' got rule = None", "kind 'rule' needs a rule"]),
        (
            "rl",
            ["rewards=[{kind: model, rule: x}]"],
            ["'model' got rule = 'x'", "the others take none"],
        ),
        ("rl", ["train.shuffle=true"], ["train.shuffle: true is no longer read", "write samples for what true meant"]),
        ("rl", ["train.shuffle=false"], ["train.shuffle: false is no longer read", "write none for what false meant"]),
        ("rl", ["train.shuffle=group"], ["train.shuffle: ", "got 'group'", "did you mean 'groups'?"]),
        ("rl", ["rewards=[]"], ["rewards is empty", "[{kind: rule, rule: exact_match}]"]),
        ("rl", ["critic="], ["algo.advantage = 'gae' needs values", "give a critic section"]),
        ("rl", ["reward_model="], ["rewards names the reward model", "give a reward_model section"]),
        (
            "rl",
            ["algo.advantage=group_relative"],
            ["'group_relative' compares the samples", "rollout.num_samples_per_prompt >= 2; got 1"],
        ),
        (
            "rl",
            ["algo.advantage=leave_one_out"],
            ["'leave_one_out' compares the samples", "rollout.num_samples_per_prompt >= 2; got 1"],
        ),
        (
            "rl",
            ["algo.dynamic_sampling.max_refills=1"],
            ["algo.dynamic_sampling compares the samples", "rollout.num_samples_per_prompt >= 2; got 1"],
        ),
        (
            "rl",
            ["rewards=[{kind: rule, rule: exact_match, normalise: group}]"],
            ["rewards[0].normalise = group compares the samples", "num_samples_per_prompt >= 2; got 1"],
        ),
        (
            "rl",
            [
                "algo.advantage=remax",
                "rollout.num_samples_per_prompt=2",
                "rewards=[{kind: rule, rule: exact_match, normalise: group}]",
            ],
            ["rewards[0].normalise = group, and algo.advantage = 'remax'", "would always be 0"],
        ),
        (
            "rl",
            ["algo.kl={coef: 0.1, controller: adaptive, target: 0.1, horizon: 1}"],
            ["algo.kl.horizon = 1, and a step has ", "would not stay above 0; give "],
        ),
        ("rl", ["algo.overlong.buffer_tokens=4000"], ["buffer_tokens = 4000 is longer than the longest response"]),
        ("rl", ["algo.overlong.penalty=2"], ["penalty = 2.0 has no effect without buffer_tokens", "give both"]),
        (
            "rl",
            ["algo.dynamic_sampling.reward_range=[0, 1]"],
            ["reward_range has no effect with max_refills = 0", "set max_refills to 1"],
        ),
        (
            "rl",
            ["algo.dynamic_sampling={max_refills: 1, reward_range: [1, 0]}"],
            ["reward_range = [1.0, 0.0] holds no reward", "the lower one first"],
        ),
        (
            "rl",
            ["train.stop.validation_reward_patience=2"],
            ["train.stop.patience counts evaluations", "set eval.every and data.validation"],
        ),
        (
            "rl",
            ["train.stop.validation_reward_patience=2", "eval.every=1", "data.validation="],
            ["set eval.every and data.validation"],
        ),
        (
            "sft",
            ["train.stop.patience=2", "eval.every=1"],
            ["train.stop.patience counts", "set eval.every and data.val"],
        ),
        ("sft", ["train.stop.metric=eval_loss"], ["train.stop: metric without patience", "set patience too"]),
        ("sft", ["checkpoint.best={metric: eval_loss}"], ["checkpoint.best counts evaluations"]),
        ("sft", ["checkpoint.best={}"], ["missing key 'checkpoint.best.metric'"]),
        (
            "sft",
            ["checkpoint.best={metric: eval_los}", *EVALUATED],
            ["'eval_los' is no metric of sft's held-out data", "did you mean 'eval_loss'?"],
        ),
        ("rm", ["checkpoint.best={metric: eval_accuracy}", *EVALUATED], ["no metric of rm's", "eval_pair_accuracy"]),
        ("rl", ["checkpoint.best={metric: loss}", *EVALUATED], ["known are eval_reward_mean, eval_accuracy"]),
        (
            "rl",
            ["checkpoint.best={metric: test_accuracy}", *EVALUATED],
            ["no metric of rl's", "did you mean 'eval_acc"],
        ),
        (
            "dpo",
            ["train.stop={patience: 1, metric: eval_chosen_logprob}", "eval.every=1"],
            ["which way is better is not in its name", "set train.stop.mode to min or max"],
        ),
        (
            "rm",
            ["checkpoint.best={metric: eval_loss}", "unit_variance=true", *EVALUATED],
            ["scores on another scale", "choose by eval_pair_accuracy"],
        ),
        (
            "rl",
            ["train.stop={validation_reward_patience: 2, metric: eval_accuracy}", *EVALUATED],
            ["give patience with another metric"],
        ),
        (
            "rl",
            ["train.stop={validation_reward_patience: 2, patience: 3}", *EVALUATED],
            ["is an earlier name of patience = 3"],
        ),
        (
            "generate",
            ["data.validation=h.jsonl"],
            ["would leave data.validation = h.jsonl unread", "set data.train to"],
        ),
        ("generate", ["data.test=h.jsonl"], ["would leave data.test = h.jsonl unread", "set data.train to"]),
        (
            "generate",
            ["rewards=[{kind: model}]"],
            ["build no reward model", "got a reward of kind 'model'", "{kind: classifier, path: ...}"],
        ),
        (
            "generate",
            ["rewards=[{kind: rule, rule: exact_match, weight: 2, clip: 1}]"],
            ["what a rule says, unchanged; remove rewards[0].weight = 2.0, rewards[0].clip = 1.0"],
        ),
        ("rl", ["ptx={data: t.jsonl}"], ["ptx needs packed micro-batches", "set train.max_tokens_per_micro_batch"]),
        ("rl", [*PACKED, "ptx={data: t.jsonl, max_tokens: 200}"], ["ptx.max_tokens = 200 does not fit: give 2 to"]),
        ("rl", ["rollout.top_p=0.9"], ["rollout.top_p = 0.9 cannot be trained with", "of the full distribution"]),
        ("rl", ["rollout.top_k=5", "rollout.min_p=0.1"], ["rollout.top_k = 5 and rollout.min_p = 0.1 cannot be"]),
        (
            "generate",
            ["rollout.top_k=5"],
            ["rollout.top_k = 5 has no effect with greedy = true"],
        ),
        ("generate", ["select=best"], ["select = best chooses among", "got 0 rewards and rollout.num_samples"]),
        ("generate", ["min_reward=1"], ["min_reward = 1.0 has no effect with select = all"]),
        ("generate", ["pairs_per_prompt=2"], ["pairs_per_prompt = 2 has no effect with select = all"]),
        (
            "generate",
            [
                "pairs_per_prompt=3",
                "select=best_and_worst",
                "rollout.num_samples_per_prompt=5",
                "greedy=false",
                "rewards=[{kind: rule, rule: exact_match}]",
            ],
            ["needs two responses a pair; got rollout.num_samples_per_prompt = 5: set it to 6 or more"],
        ),
        ("rl", ["rollout.balance=dynamic"], ["rollout.balance: ", "'on_demand', 'length' or 'fixed'"]),
        ("rl", ["rollout.stop=['']"], ["rollout.stop.0: String should have at least 1 character"]),
        ("generate", ["rollout.num_samples_per_prompt=4"], ["would write 4 equal responses", "set greedy to false"]),
        (
            "sft",
            ["train.max_tokens_per_micro_batch=64"],
            ["train: ", "max_tokens_per_micro_batch = 64 and micro_batch_samples = 2; give one of them"],
        ),
        ("rm", ["train.micro_batch_samples="], ["train: ", "= None and micro_batch_samples = None; give one"]),
        (
            "rl",
            [*PACKED, "data.max_prompt_tokens=100", "rollout.max_response_tokens=29"],
            ["max_prompt_tokens + rollout.max_response_tokens = 129 tokens", "= 128", "never split", "raise it to 129"],
        ),
    ],
)
def test_every_check_across_keys_says_what_to_do(refusal, command, overrides, words):
    message = refusal(command, *overrides)
    assert [word for word in words if word not in message] == [], message


@pytest.mark.parametrize(
    "command, overrides",
    [
        ("sft", ["actor.parallel.sequence_parallel=true", "actor.parallel.tp=2"]),
        ("sft", ["actor.parallel={pp: 3, layers_per_stage: [2, 2, 1]}"]),
        ("sft", ["actor.parallel={pp: 2, vpp: 2, layers_per_stage: [1, 2, 2, 1]}"]),
        ("rm", ["unit_variance=true", "data.validation=data/validation.jsonl"]),
        ("rl", ["rewards=[{kind: rule, rule: x}]", "reward_model="]),
        ("rl", ["algo.advantage=group_relative", "rollout.num_samples_per_prompt=2", "critic="]),
        ("rl", VLLM_TP),
        ("rl", ["critic.model.fresh_head=true"]),
        ("sft", ["actor.optim={lr: 1e-4, min_lr: 1e-4, schedule: linear}"]),
        ("rl", ["rollout.parallel.tp=", "rollout.engine_args={}", "rollout.engine=megatron"]),
        ("sft", ["data.validation.split=test", "data.validation.path=data", "data.train_split="]),
        ("rl", ["train.stop.validation_reward_patience=2", "eval.every=1"]),
        ("generate", ["rewards=[{kind: rule, rule: exact_match}]"]),
        ("sft", PACKED),
        ("rl", [*PACKED, "data.max_prompt_tokens=100", "rollout.max_response_tokens=28"]),
    ],
)
def test_following_the_advice_is_accepted(load, command, overrides):
    """The neighbours of the refused cases, so that no check refuses everything."""
    assert isinstance(load(command, *overrides), KINDS[command][0])


def test_the_layout_of_a_world_that_does_not_divide_names_the_near_ones(load):
    parallel = load("sft", "actor.parallel={tp: 2, pp: 2}").actor.parallel
    assert (parallel.layout(12).dp, parallel.layout(12).world_size) == (3, 12)
    with pytest.raises(
        ValueError, match=r"actor\.parallel: world size 6 .* 2 x 1 x 2 = 4; use 4 or 8 ranks \(run\.nproc\)"
    ):
        parallel.layout(6)
    with pytest.raises(ValueError, match=r"critic\.parallel: world size 2 .*use 4 ranks \(run"):
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
