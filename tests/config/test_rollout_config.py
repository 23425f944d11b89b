"""What the rollout section takes and refuses. Not covered: that vLLM does with an argument what it says."""

import pytest

from megarlhf.config import EvaluateConfig, LogprobGapConfig, RLConfig, RolloutConfig
from megarlhf.config.rollout import RESERVED_ARGS
from megarlhf.rollout.vllm.arguments import known_arguments, unknown_arguments
from tests.refuses import missing_names, refuses


def test_engine_arguments_come_from_file_and_command_line(load):
    cfg = load("generate", "rollout.vllm.args.max_num_seqs=64", "rollout.vllm.args.compilation_config={mode: 0}")
    assert cfg.rollout.vllm.args == {"max_num_seqs": 64, "compilation_config": {"mode": 0}}
    assert RolloutConfig().vllm.args == {}


def test_slices_turn_the_correction_on_unless_one_is_given(load):
    """`auto`, the default, is `none` for whole responses of the step's own weights."""
    for keys, kind in (
        ([], "none"), (["rollout.slices=3"], "truncate"), (["rollout.steps_ahead=1"], "truncate"),
        (["rollout.slices=3", "algo.rollout_correction.kind=mask"], "mask"),
        (["algo.rollout_correction.kind=truncate"], "truncate"),
    ):  # fmt: skip
        cfg = load("rl", *keys)
        assert (cfg.rollout_correction.kind, cfg.rollout.is_stale) == (kind, any("rollout.s" in key for key in keys))


def test_slices_are_for_training(refusal):
    for key in ("slices=2", "steps_ahead=1", "gap_probe_samples=9"):
        assert not missing_names(refusal("generate", f"rollout.{key}"), f"rollout.{key.replace('=', ' = ')}", "for rl")
    tree = {"run": {"dir": "runs"}, "actor": {"model": {"path": "m"}}, "data": {"train": "a.jsonl"}}
    with pytest.raises(ValueError, match=r"rollout.slices = 2 is for rl"):
        EvaluateConfig.model_validate({**tree, "rollout": {"slices": 2}})


@pytest.mark.parametrize("name, reason", [
    ("dtype", "rollout.dtype"), ("seed", "run.seed"), ("hf_overrides", "config.json"), ("load_format", "actor"),
    ("tensor_parallel_size", "rollout.parallel.tp"), ("logprobs_mode", "sampled"), ("enable_lora", "weights"),
])  # fmt: skip
def test_arguments_that_megarlhf_sets_are_refused_with_the_reason(refusal, name, reason):
    message = refusal("generate", f"rollout.vllm.args.{name}=1", "rollout.vllm.args.max_num_seqs=8")
    assert not missing_names(message, "rollout.vllm.args", f"{name}:", reason)
    assert "max_num_seqs" not in message


def test_every_reserved_argument_is_one_of_vllm_and_so_are_those_that_the_engine_gives():
    """A name that vLLM has dropped would protect nothing."""
    known = known_arguments()
    assert len(known) > 100
    assert RESERVED_ARGS.keys() - known == set()
    assert {"max_num_seqs", "enforce_eager", "disable_custom_all_reduce"} <= known - RESERVED_ARGS.keys()


def test_an_argument_that_vllm_does_not_know_is_told_with_the_nearest():
    near, far = unknown_arguments(["max_num_seqs", "max_num_seq", "zzz"])
    assert not missing_names(near, "'max_num_seq'", "'max_num_seqs'") + missing_names(far, "'zzz'")


def test_without_vllm_or_with_another_source_nothing_is_known(tmp_path):
    """Building the engine refuses the name then."""
    assert known_arguments([str(tmp_path)]) == frozenset()
    (tmp_path / "vllm/engine").mkdir(parents=True)
    (tmp_path / "vllm/__init__.py").write_text("raise RuntimeError('must not be imported')")
    assert known_arguments([str(tmp_path)]) == frozenset()
    (tmp_path / "vllm/engine/arg_utils.py").write_text("class EngineArgs:\n    model: str = ''\n    _own: int = 0\n")
    assert known_arguments([str(tmp_path)]) == {"model"}


def test_the_key_of_old_is_told_what_to_write_instead(load):
    with refuses("rollout", "max_logprob_gap = 0.5", "logprob_gap: {mean: ..., p999: ...}"):
        load("generate", "rollout.max_logprob_gap=0.5")


def test_limits_of_the_gap_follow_the_dtype_unless_they_are_given():
    assert LogprobGapConfig().limits("fp32") == {"mean": 1e-3, "p999": 1e-2}
    assert LogprobGapConfig(p999=5.0).limits("bf16") == {"mean": 0.1, "p999": 5.0}


@pytest.mark.parametrize(("advantage", "actor"), [("gae", 30), ("group_relative", 40)])
def test_the_actor_s_learning_rate_counts_the_steps_in_which_it_is_trained(advantage, actor):
    """20 steps of 2 mini-batches; the first 5 train the critic alone, where there is one."""
    role = {"model": {"path": "m"}}
    tree = {
        "run": {"dir": "r"}, "actor": role, "critic": role, "rewards": [{"kind": "rule", "rule": "exact_match"}],
        "data": {"train": "d", "max_prompt_tokens": 8}, "rollout": {"num_samples_per_prompt": 2},
        "algo": {"advantage": advantage},
        "train": {"num_steps": 20, "prompts_per_step": 4, "mini_batch_samples": 4, "micro_batch_samples": 1,
                  "critic_warmup_steps": 5},
    }  # fmt: skip
    cfg = RLConfig.model_validate(tree)
    assert (cfg.optimizer_steps("actor"), cfg.optimizer_steps("critic")) == (actor, 40)


def test_a_word_that_was_a_boolean_in_yaml_1_1_does_not_reach_vllm_as_a_text(refusal):
    assert "enforce_eager: write true or false" in refusal("generate", "rollout.vllm.args={enforce_eager: off}")
