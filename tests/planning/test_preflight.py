"""What is refused or noted about a run before it starts, apart from arithmetic and layouts: data that is missing or
trained on twice, limits of tokens, tokenizers, what vLLM cannot hold, outputs that cannot be written. Not covered: data
of a format that cannot be read (it shows at load)."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarlhf.config import EvaluateConfig, GenerateConfig
from megarlhf.planning.preflight import preflight
from megarlhf.rollout.vllm.arguments import cpu_experts_multiple, cpu_head_sizes
from tests.planning.configs import ROWS, rl, role, sft
from tests.refuses import missing_names, refuses

UNREAD = "set, but without effect here: "


def test_a_dtype_that_cannot_be_followed_is_refused_for_the_role_that_has_it(paths):
    critic = role(paths, paths["make"]("half", dtype="float16"))
    with refuses("critic.model.dtype = auto", str(paths["root"] / "half/config.json"), "float16"):
        preflight("rl", rl(paths, critic=critic), 1)
    critic["model"]["dtype"] = "bf16"
    plan = preflight("rl", rl(paths, critic=critic, algo={"kl": {"log": True}}), 1)
    assert [model.split(", ")[-1] for _, model, _ in plan.roles] == ["fp32 by default)"] * 2 + ["bf16 as configured)"]


def test_ranks_to_profile_are_those_of_the_run(paths):
    profiled = rl(paths, profile={"steps": [3, 2], "ranks": [0, 2]})
    with refuses("profile.ranks", "rank 2", "2 rank(s)", "0 to 1"):
        preflight("rl", profiled, 2)
    fitting = profiled.model_copy(update={"train": profiled.train.model_copy(update={"mini_batch_samples": 24})})
    assert any(not missing_names(note, "step 2, 3", "rank 0, 2") for note in preflight("rl", fitting, 4).notes)
    unread = rl(paths, profile={"ranks": [0]})
    assert any(note.startswith(UNREAD + "profile.ranks (") for note in preflight("rl", unread, 2).notes)


def test_an_argument_that_vllm_does_not_know_is_refused_before_anything_starts(paths):
    with refuses("rollout.vllm.args", "'max_num_seq'", "'max_num_seqs'"):
        preflight("rl", rl(paths, rollout={"vllm": {"args": {"max_num_seq": 8}}, "engine": "vllm"}), 1)


@pytest.mark.parametrize("key", ["train", "validation"])
@pytest.mark.parametrize("name", ["trian.jsonl", "sub/trian"])
def test_data_that_is_not_there_is_refused_and_names_its_neighbour(paths, key, name):
    missing = paths["root"] / name
    first_missing = paths["root"] / name.partition("/")[0]
    with refuses(f"data.{key}", str(first_missing), "train.jsonl", f"working directory: {Path.cwd()}"):
        preflight("sft", sft(paths, **{key: missing}), 1)
    with refuses(f"data.{key}", str(first_missing)):
        preflight("rl", rl(paths, data={key: missing}), 1)


def said_of(cfg):
    """Notes of a dry run, but for how records become text."""
    return [note for note in preflight("sft", cfg, 1).notes if not note.endswith("texts as they stand")]


def test_data_that_is_held_out_is_not_trained_on(paths, monkeypatch):
    """However the paths are spelt. The same data twice is taken as meant, and said."""
    root = paths["root"]
    same_data = "data.validation is data.train"
    both, splits = root / "both", root / "splits"
    for folder, names in ((both, "ab"), (splits, ("train", "heldout", "test"))):
        folder.mkdir()
        for name in names:
            (folder / f"{name}.jsonl").write_text(ROWS)
    (root / "link.jsonl").symlink_to(both / "b.jsonl")
    monkeypatch.chdir(both)
    for train, validation in (
        (both, both / "b.jsonl"), (both, "../both/b.jsonl"), (both, root / "link.jsonl"), ("b.jsonl", both),
        ("../both", "b.jsonl"),
    ):  # fmt: skip
        with refuses("held-out data", f"{both / 'b.jsonl'}:"):
            preflight("sft", sft(paths, train=train, validation=validation), 1)
    (both / "c.jsonl").symlink_to(splits / "train.jsonl")
    with refuses("splits, split train", "data.validation", str(both), f"{splits / 'train.jsonl'}:", "held-out data"):
        preflight("rl", rl(paths, data={"train": {"path": splits, "split": "train"}, "validation": both}), 1)
    for validation in ({"path": splits, "split": "test"}, splits / "heldout.jsonl"):
        train = {"path": splits, "split": "train"}
        assert said_of(sft(paths, train=train, validation=validation)) == []
    for train, validation in (("b.jsonl", "../both/b.jsonl"), (both, "."), ("b.jsonl", root / "link.jsonl")):
        (note,) = said_of(sft(paths, train=train, validation=validation))
        assert note.startswith(same_data)
    with_network(monkeypatch)
    hub = Path("owner/name")
    assert preflight("sft", sft(paths, train=hub, validation=hub), 1).notes[-1].startswith(same_data)
    notes = preflight("sft", sft(paths, train=hub, validation={"path": hub, "split": "test"}), 1).notes
    assert [note.partition(":")[0] for note in notes] == ["data.train = owner/name", "data.validation = owner/name"]


def with_network(monkeypatch):
    for variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)


def test_a_name_of_the_hub_is_left_to_the_loader_and_said(paths, monkeypatch):
    """Also one with a dot, which is no file's suffix. Where the network is switched off it is refused."""
    for name in ("owner/name", "owner/name-v1.5"):
        with_network(monkeypatch)
        (note,) = said_of(sft(paths, validation=Path(name)))
        assert not missing_names(note, f"data.validation = {name}", "Hugging Face")
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        with refuses(f"data.validation = {name} does not exist", "HF_HUB_OFFLINE = 1"):
            preflight("sft", sft(paths, validation=Path(name)), 1)


def test_another_config_beside_a_hugging_face_directory_is_refused(paths):
    other = paths["make"]("other")
    actor = role(paths)
    actor["model"]["hf"] = other
    with refuses(str(paths["model"]), "config.json", str(other)):
        preflight("rl", rl(paths, actor=actor), 1)
    actor["model"]["hf"] = paths["model"]
    assert preflight("rl", rl(paths, actor=actor), 1).numbers


def test_heads_that_vllm_s_attention_on_a_cpu_does_not_take_are_refused(paths, monkeypatch):
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert cpu_head_sizes() == tuple(CPUAttentionBackend.get_supported_head_sizes())
    assert cpu_head_sizes([str(paths["root"])]) == (), "without vLLM nothing is known"
    cfg = rl(paths, rollout={"engine": "vllm"})
    with refuses("8 (head_dim)", "32", "rollout.engine=megatron"):
        preflight("rl", cfg, 1)
    assert preflight("rl", rl(paths), 1).numbers
    monkeypatch.setattr("megarlhf.planning.preflight.capabilities", lambda: SimpleNamespace(device_type="cuda"))
    assert preflight("rl", cfg, 1).numbers


def test_experts_that_vllm_on_a_cpu_does_not_take_are_refused(paths):
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    assert cpu_experts_multiple() == CPUUnquantizedExperts.output_alignment
    assert cpu_experts_multiple([str(paths["root"])]) == 1, "without vLLM nothing is known"
    mixture = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
    heads = {"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    for hidden, fits in ((48, False), (64, True)):
        model = paths["make"](f"of{hidden}", **mixture, **heads, hidden_size=hidden)
        cfg = rl(paths, actor=role(paths, model), rollout={"engine": "vllm"})
        if fits:
            assert preflight("rl", cfg, 1).numbers
            continue
        with refuses("hidden_size = 48", "multiples of 32", "rollout.engine=megatron"):
            preflight("rl", cfg, 1)


def test_rl_that_would_outgrow_the_positions_of_any_role_is_refused(paths):
    """40 + 24 = 64 tokens just fit the actor's 64 positions; one more does not, and the critic has only 48."""
    assert preflight("rl", rl(paths), 1).numbers
    keys = "data.max_prompt_tokens + rollout.max_response_tokens"
    with refuses("actor", f"{keys} = 40 + 25 = 65 tokens", "max_position_embeddings = 64", "by 1 tokens"):
        preflight("rl", rl(paths, rollout={"max_response_tokens": 25}), 1)
    short = paths["make"]("short", max_position_embeddings=48)
    with refuses("critic", f"{keys} = 40 + 24 = 64 tokens", "max_position_embeddings = 48", "by 16 tokens"):
        preflight("rl", rl(paths, critic=role(paths, model=short)), 1)
    # The data of SFT may be shorter than its limits.
    assert preflight("sft", sft(paths, max_prompt_tokens=500, max_response_tokens=500), 1).numbers


def test_generate_has_no_batch_arithmetic_and_is_checked_all_the_same(paths):
    tree = {"run": {"dir": "r"}, "actor": role(paths, tp=3), "data": {"train": paths["train"]}}
    with refuses("4 KV heads"):
        preflight("generate", GenerateConfig.model_validate(tree), 3)
    tree |= {"actor": role(paths), "rollout": {"max_response_tokens": 8, "engine": "megatron"}}
    with refuses("1024 + 8 = 1032 tokens"):
        preflight("generate", GenerateConfig.model_validate(tree), 2)
    tree["data"]["max_prompt_tokens"] = 8
    assert preflight("generate", GenerateConfig.model_validate(tree), 2).numbers == ()


def test_a_tokenizer_larger_than_a_role_s_vocabulary_is_refused(paths):
    """16 tokens; an id without an embedding would read a row of padding, in silence."""
    small = paths["make"]("small", vocab_size=15)
    with refuses("critic", "16 tokens", str(small), "vocab_size = 15"):
        preflight("rl", rl(paths, critic=role(paths, model=small)), 1)


def test_that_there_is_no_accuracy_is_said_where_there_is_held_out_data(paths):
    def said(**others):
        return [note for note in preflight("rl", rl(paths, **others), 1).notes if "eval" in note or "samples." in note]

    own = {"rewards": [{"kind": "rule", "rule": "tests.distributed.user_rewards:short"}]}
    held_out = {"data": {"validation": paths["train"]}}
    assert said(**held_out) == said(**own) == said(**held_out, **own, eval={"accuracy": "exact_match"}) == []
    (note,) = said(**held_out, **own)
    assert missing_names(note, "eval_accuracy", "rewards") == []
    with refuses("eval.accuracy = 'exactmatch'", "rewards"):
        said(**held_out, eval={"accuracy": "exactmatch"})
    unread = said(eval={"accuracy": "exact_match"}, samples={"every": 3, "count": 0})
    assert [note.split(" (")[0].rpartition(" ")[2] for note in unread] == ["eval.accuracy", "samples.every"]


def test_weights_and_biases_is_looked_for_before_a_rank_starts(paths, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    run = {"dir": "r", "wandb": {"project": "mine", "mode": "offline"}}
    with refuses("wandb is not installed"):
        preflight("rl", rl(paths, run=run), 1)


def test_experts_are_rolled_out_by_vllm(paths):
    mixture = {"model_type": "mixtral", "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
    actor = role(paths, model=paths["make"]("mixture", **mixture))
    for engine in ("vllm", "megatron"):
        assert preflight("rl", rl(paths, actor=actor, rollout={"engine": engine}), 1).numbers


def test_what_vllm_cannot_hold_is_refused(paths):
    """A parameter that its model lacks; the Megatron engine takes the actor as it is. tp: illegal.py."""
    biased = role(paths, model=paths["make"]("biased", model_type="qwen3", attention_bias=True))
    assert preflight("rl", rl(paths, actor=biased), 1).numbers
    with refuses("rollout.parallel.tp = 1", "qwen3", "parameter", "rollout.engine=megatron"):
        preflight("rl", rl(paths, actor=biased, rollout={"engine": "vllm"}), 1)


def test_an_output_that_cannot_be_written_is_refused_before_the_start(paths, tmp_path):
    """A directory, data, what eval would ignore, and a run directory below a file. Not covered: permissions."""
    out = tmp_path / "out.jsonl"
    tree = {
        "run": {"dir": tmp_path / "run", "on_existing": "overwrite"}, "actor": role(paths),
        "data": {"train": paths["train"], "max_prompt_tokens": 8},
        "rollout": {"engine": "megatron", "max_response_tokens": 8},
        "rewards": [{"kind": "rule", "rule": "exact_match"}],
    }  # fmt: skip
    cfg = GenerateConfig.model_validate(tree)
    out.write_text("{}")
    for changed, names in (
        ({"out": tmp_path}, (f"out = {tmp_path}", "directory")),
        ({"out": paths["train"]}, (f"out = {paths['train']}", f"data.train = {paths['train']}")),
        ({"run": cfg.run.model_copy(update={"dir": out / "run"})}, (str(out / "run"), f"{out}, which is a file")),
    ):
        with refuses(*names):
            preflight("generate", cfg.model_copy(update=changed), 1)
    assert preflight("generate", cfg.model_copy(update={"out": out}), 1).title == "generate"


def test_eval_is_checked_by_what_it_reads(paths, tmp_path):
    """Engines and positions where responses are drawn, rules before the start, keys that no task reads."""
    tree = {"run": {"dir": tmp_path / "run"}, "actor": role(paths) | {"optim": {"lr": 0.5}}}
    tree["data"] = {"train": paths["train"], "max_prompt_tokens": 8, "max_response_tokens": 7}

    def of(**changed):
        return preflight("eval", EvaluateConfig.model_validate(tree | changed), 1)

    def unread(checked):
        notes = [note.removeprefix(UNREAD) for note in checked.notes if note.startswith(UNREAD)]
        return {note.split(" (")[0] for note in notes}

    rules, rollout = [{"kind": "rule", "rule": "exact_match"}], {"engine": "megatron", "max_response_tokens": 8}
    assert unread(of(rollout={"max_response_tokens": 999}, greedy=False)) == {
        "actor.optim", "greedy", "rollout.max_response_tokens",
    }  # fmt: skip
    generation = of(rewards=rules, rollout=rollout | {"temperature": 0.5})
    assert unread(generation) == {"actor.optim", "rollout.temperature", "data.max_response_tokens"}
    with refuses("8 + 999 = 1007 tokens"):
        of(rewards=rules, rollout=rollout | {"max_response_tokens": 999})
    rules, samples = [{**rules[0], "rule": "tests.distributed.user_rewards:short"}], {"num_samples_per_prompt": 2}
    samples |= rollout
    with refuses("eval.pass_at = [2]", "eval_accuracy"):
        of(rewards=rules, rollout=samples, greedy=False, eval={"pass_at": [2]})
    model = role(paths, model=paths["make"]("other", vocab_size=15))
    with refuses("against", "16 tokens", str(paths["root"] / "other"), "vocab_size = 15"):
        of(rewards=[{"kind": "model"}], rollout=rollout, against=model, reward_model=role(paths))
