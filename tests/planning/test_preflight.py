"""What is decided about a run before it starts: batch arithmetic, legality of layouts, data that is missing.

Not covered: memory and time (no such plan yet), and data of a format that cannot be read (it shows at load).
"""

import json
from pathlib import Path

import pytest

from megarlhf.config import GenerateConfig, RLConfig, RMConfig, SFTConfig
from megarlhf.planning.batch import BatchNumber, rl_batch_numbers, schedule_notes, supervised_batch_numbers
from megarlhf.planning.legality import check_role
from megarlhf.planning.preflight import preflight
from tools.demo.make_data import train_tokenizer

MODEL = {
    "model_type": "llama",
    "num_hidden_layers": 6,
    "hidden_size": 96,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "intermediate_size": 160,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
}
TRAIN = {"num_steps": 10, "mini_batch_samples": 8, "micro_batch_samples": 2}
RL_TRAIN = {**TRAIN, "prompts_per_step": 6, "epochs_per_step": 3}


@pytest.fixture
def paths(tmp_path):
    """A model's configuration, and data that exists (its content is not read here)."""

    def model(name, **changes):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps({**MODEL, **changes}))
        (directory / "tokenizer.model").write_bytes(train_tokenizer())
        return directory

    for name in ("train", "heldout"):
        (tmp_path / f"{name}.jsonl").write_text("{}\n")
    return {"model": model("model"), "make": model, "train": tmp_path / "train.jsonl", "root": tmp_path}


def role(paths, model=None, **parallel):
    """There are no weights to read, but a configuration."""
    return {"model": {"path": model or paths["model"], "random_init": True}, "parallel": parallel}


def sft(paths, *, parallel=None, **data):
    data = {"train": paths["train"], **data}
    actor = role(paths, **(parallel or {}))
    return SFTConfig.model_validate({"run": {"dir": "r"}, "actor": actor, "data": data, "train": TRAIN})


def rl(paths, *, train=None, rollout=None, actor=None, critic=None, data=None, **others):
    tree = {
        "run": {"dir": "r"},
        "actor": actor or role(paths),
        "critic": critic or role(paths),
        "rewards": [{"kind": "rule", "rule": "exact_match"}],
        "data": {"train": paths["train"], "max_prompt_tokens": 40, **(data or {})},
        "train": {**RL_TRAIN, **(train or {})},
        "rollout": {"num_samples_per_prompt": 4, "max_response_tokens": 24, "engine": "megatron", **(rollout or {})},
        **others,
    }
    return RLConfig.model_validate(tree)


def by_words(numbers):
    return {number.words: number.value for number in numbers}


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


def test_a_dtype_that_cannot_be_followed_is_refused_for_the_role_that_has_it(paths):
    critic = role(paths, paths["make"]("half", dtype="float16"))
    with pytest.raises(
        ValueError, match=r"critic\.model\.dtype = auto, but .*half/config.json says float16; set critic"
    ):
        preflight("rl", rl(paths, critic=critic), 1)
    critic["model"]["dtype"] = "bf16"
    plan = preflight("rl", rl(paths, critic=critic), 1)
    assert [model.split(", ")[-1] for _, model, _ in plan.roles] == ["fp32 by default)"] * 2 + ["bf16 as configured)"]


def test_an_argument_that_vllm_does_not_know_is_refused_before_anything_starts(paths):
    rollout = {"engine_args": {"max_num_seq": 8}}
    with pytest.raises(
        ValueError, match=r"rollout\.engine_args: vLLM has no .*'max_num_seq'; did you mean 'max_num_seqs'"
    ):
        preflight("rl", rl(paths, rollout={**rollout, "engine": "vllm"}), 1)
    preflight("rl", rl(paths, rollout=rollout), 1)  # sampled by the actor itself: not read


def test_the_arithmetic_of_rm_counts_pairs(paths):
    tree = {"run": {"dir": "r"}, "reward_model": role(paths, pp=2), "data": {"train": paths["train"]}, "train": TRAIN}
    plan = preflight("rm", RMConfig.model_validate(tree), 4)
    found = by_words(plan.numbers)
    assert found["data-parallel ranks of reward_model"] == 2
    assert found["preference pairs (two sequences each) per optimizer step on one data-parallel rank"] == 4
    assert found["micro-batches per optimizer step on one data-parallel rank"] == 2


def test_the_arithmetic_of_rl_by_hand_with_a_layout_of_each_role(paths):
    """6 prompts x 4 samples = 24 samples = 3 mini-batches of 8; actor and reference dp 2, critic dp 4."""
    cfg = rl(paths, actor=role(paths, tp=2), critic=role(paths), rollout={"parallel": {"tp": 2}})
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


def test_a_mini_batch_that_does_not_divide_names_both_numbers_and_their_keys(paths):
    train = sft(paths).train
    expected = (
        "train.mini_batch_samples = 8 is not a multiple of data-parallel ranks of actor x train.micro_batch_samples "
        "= 3 x 2 = 6; use 6 or 12, or change train.micro_batch_samples or actor.parallel"
    )
    with pytest.raises(ValueError, match=r"^train\.mini_batch_samples = 8 ") as raised:
        supervised_batch_numbers(train, 3, "actor", "sequences")
    assert str(raised.value) == expected


def test_a_mini_batch_smaller_than_one_forward_of_all_ranks_names_one_number_to_use(paths):
    with pytest.raises(ValueError, match=r"mini_batch_samples = 8 .* = 8 x 2 = 16; use 16, or change"):
        supervised_batch_numbers(sft(paths).train, 8, "actor", "sequences")


def test_a_warm_up_longer_than_the_run_is_said(paths):
    """10 steps of 3 mini-batches and 3 passes: 90 updates of the critic; the actor's begin after the critic's own."""
    cfg = sft(paths)
    late = cfg.actor.model_copy(update={"optim": cfg.actor.optim.model_copy(update={"warmup_steps": 11})})
    assert preflight("sft", cfg, 1).notes == ()
    (said,) = preflight("sft", cfg.model_copy(update={"actor": late}), 1).notes
    assert said.startswith("actor: actor.optim.warmup_steps = 11, but the run has 10 optimizer steps: it ends before")
    slow = {**role(paths), "optim": {"warmup_steps": 90}}
    assert schedule_notes(rl(paths, actor=slow, critic=slow)) == []
    said = schedule_notes(rl(paths, actor=slow, critic=slow, train={"critic_warmup_steps": 4}))
    assert [note.partition(",")[2] for note in said] == [
        " but the run has 54 optimizer steps: it ends before the learning rate reaches actor.optim.lr"
    ]
    (said,) = schedule_notes(rl(paths, train={"critic_warmup_steps": 10}))
    assert said.startswith("actor: never trained, as train.critic_warmup_steps = 10 of train.num_steps = 10")


@pytest.mark.parametrize(
    "change, world, expected",
    [
        (
            {"train": {"mini_batch_samples": 10}},
            1,
            [
                "samples per step = train.prompts_per_step x rollout.num_samples_per_prompt = 6 x 4 = 24 is not",
                "a multiple of train.mini_batch_samples = 10; use 20 or 30, or change train.mini_batch_samples",
            ],
        ),
        (
            {"train": {"mini_batch_samples": 6, "micro_batch_samples": 2}},
            2,
            [
                "train.mini_batch_samples = 6 is not a multiple of data-parallel ranks of actor x",
                "train.micro_batch_samples = 2 x 2 = 4; use 4 or 8, or change train.micro_batch_samples or",
                "actor.parallel",
            ],
        ),
        (
            {"actor": {"tp": 4}, "train": {"micro_batch_samples": 4}},
            4,
            [
                "train.mini_batch_samples = 8 is not a multiple of data-parallel ranks of critic x",
                "train.micro_batch_samples = 4 x 4 = 16; use 16, or change train.micro_batch_samples or",
                "critic.parallel",
            ],
        ),
        (
            {"rollout": {"parallel": {"tp": 3}}},
            4,
            ["4 ranks do not divide into engines of rollout.parallel.tp = 3 ranks"],
        ),
    ],
)
def test_what_does_not_divide_in_rl_names_numbers_and_keys(paths, change, world, expected):
    if "actor" in change:
        change = {**change, "actor": role(paths, **change["actor"])}
    with pytest.raises(ValueError, match=r"rollout\.parallel|train\.") as raised:
        rl_batch_numbers(rl(paths, **change), world)
    assert str(raised.value) == " ".join(expected)


@pytest.mark.parametrize(
    "changes, tp, words",
    [
        ({}, 8, "actor.parallel.tp = 8 does not divide the 12 attention heads of {path}; choose one of 1, 2, 4"),
        ({}, 3, "actor.parallel.tp = 3 does not divide the 4 KV heads of {path}; choose one of 1, 2, 4"),
        (
            {"intermediate_size": 90},
            4,
            "actor.parallel.tp = 4 does not divide the 90 MLP width of {path}; choose one of 1, 2",
        ),
        (
            {"num_attention_heads": 5, "num_key_value_heads": 5},
            2,
            "divide the 5 attention heads of {path}; choose one of 1, 5",
        ),
    ],
)
def test_tp_that_does_not_divide_the_model_is_refused_with_what_would(paths, changes, tp, words):
    """Every advised number divides heads, KV heads and MLP alike."""
    path = paths["make"]("other", **changes)
    section = sft(paths, parallel={"tp": tp}).actor
    section = section.model_copy(update={"model": section.model.model_copy(update={"path": path})})
    with pytest.raises(ValueError, match="does not divide") as raised:
        check_role("actor", section, tp)
    assert str(raised.value).endswith(words.format(path=path))


def check(paths, parallel, **changes):
    path = paths["make"]("checked", **changes)
    section = sft(paths, parallel=parallel).actor
    section = section.model_copy(update={"model": section.model.model_copy(update={"path": path})})
    return check_role("actor", section, parallel.get("tp", 1) * parallel.get("pp", 1))


@pytest.mark.parametrize("tp, legal", [(2, True), (4, True), (6, False), (12, False)])
def test_ranks_may_share_a_kv_head_if_its_rows_can_be_cut(paths, tp, legal):
    """12 heads, 2 KV heads of 8 channels: (12 + 2 x 2) x 8 = 128 rows of QKV are cut by 4, not by 6 or 12."""
    sizes = {"num_key_value_heads": 2, "intermediate_size": 192}
    if legal:
        arch, layout = check(paths, {"tp": tp}, **sizes)
        assert (arch.num_kv_heads, layout.tp) == (2, tp)
        return
    with pytest.raises(ValueError, match=rf"tp = {tp} does not divide the 128 rows of QKV .*; choose one of 1, 2, 4$"):
        check(paths, {"tp": tp}, **sizes)


def test_a_mixture_of_experts_at_tp_needs_sequence_parallelism(paths):
    """And its experts' width counts, not that of a dense MLP which it does not have."""
    experts = {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "moe_intermediate_size": 24,
        "intermediate_size": 7,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    arch, _ = check(paths, {"tp": 4, "sequence_parallel": True}, **experts)
    assert (arch.num_experts, arch.expert_ffn_size) == (4, 24)
    for name, changes, parallel, words in (
        ("a", {}, {"tp": 2}, r"at tp = 2 needs sequence_parallel: true"),
        ("b", {"moe_intermediate_size": 6}, {"tp": 4, "sequence_parallel": True}, r"the 6 MLP width .* one of 1, 2$"),
        ("c", {"num_experts_per_tok": 1}, {}, r"one expert .* no gradient"),
    ):
        path = paths["make"](name, **{**experts, **changes})
        section = sft(paths, parallel=parallel).actor
        section = section.model_copy(update={"model": section.model.model_copy(update={"path": path})})
        with pytest.raises(ValueError, match=words):
            check_role("actor", section, parallel.get("tp", 1))


@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize("mlp", [False, True])
def test_biases_of_attention_and_mlp_are_free_of_each_other(paths, attention, mlp):
    arch, _ = check(paths, {}, attention_bias=attention, mlp_bias=mlp)
    assert (arch.qkv_bias, arch.output_bias, arch.mlp_bias) == (attention, attention, mlp)


def test_a_legal_role_has_the_architecture_and_layout_that_follow(paths):
    arch, layout = check_role("actor", sft(paths, parallel={"tp": 4, "pp": 3}).actor, 24)
    assert (arch.num_layers, arch.num_kv_heads, arch.ffn_size) == (6, 4, 160)
    assert (layout.tp, layout.pp, layout.dp, layout.cp) == (4, 3, 2, 1)


@pytest.mark.parametrize(
    "parallel, world, words",
    [
        ({"pp": 4}, 4, ["actor.parallel: 6 layers do not divide by pp = 4", "layers_per_stage"]),
        ({"pp": 2, "layers_per_stage": [4, 4]}, 2, ["actor.parallel: layers_per_stage = [4, 4]", "6 layers", "8"]),
        ({"tp": 2, "pp": 2}, 6, ["actor.parallel: world size 6", "2 x 2 = 4", "use 4 or 8 ranks"]),
        ({"tp": 4}, 2, ["actor.parallel: world size 2", "4 x 1 = 4", "use 4 ranks"]),
    ],
)
def test_stages_and_worlds_that_do_not_fit(paths, parallel, world, words):
    with pytest.raises(ValueError, match=r"^actor\.parallel") as raised:
        preflight("sft", sft(paths, parallel=parallel), world)
    assert [word for word in words if word not in str(raised.value)] == [], raised.value


def test_uneven_stages_that_add_up_are_legal(paths):
    """The stages in the middle may differ too."""
    for layers in ([1, 2, 2, 1], [1, 3, 1, 1]):
        assert preflight("sft", sft(paths, parallel={"pp": 4, "layers_per_stage": layers}), 4).numbers


def test_each_role_is_checked(paths):
    """The critic's own model does not have the actor's heads."""
    odd = paths["make"]("odd", num_attention_heads=3, num_key_value_heads=3)
    cfg = rl(paths, actor=role(paths, tp=2), critic=role(paths, model=odd, tp=2))
    with pytest.raises(ValueError, match=r"critic\.parallel\.tp = 2 does not divide the 3 attention heads"):
        preflight("rl", cfg, 2)


@pytest.mark.parametrize("key", ["train", "heldout"])
@pytest.mark.parametrize("name", ["trian.jsonl", "sub/trian"])
def test_data_that_is_not_there_is_refused_and_names_its_neighbour(paths, key, name):
    missing = paths["root"] / name
    with pytest.raises(ValueError, match=rf"^data\.{key}: no such data file or directory: ") as raised:
        preflight("sft", sft(paths, **{key: missing}), 1)
    assert "nearest name beside it" in str(raised.value)
    assert f"working directory: {Path.cwd()}" in str(raised.value)
    with pytest.raises(ValueError, match=rf"^data\.{key}: no such data"):
        preflight("rl", rl(paths, data={key: missing}), 1)


def test_data_that_is_held_out_is_not_trained_on(paths, monkeypatch):
    """However the paths are spelt. The same data twice is taken as meant, and said."""
    root, said = paths["root"], "data.heldout is data.train: what is called held-out figures are those of the training"
    both, splits = root / "both", root / "splits"
    for folder, names in ((both, "ab"), (splits, ("train", "heldout", "validation"))):
        folder.mkdir()
        for name in names:
            (folder / f"{name}.jsonl").write_text("{}\n")
    (root / "link.jsonl").symlink_to(both / "b.jsonl")
    monkeypatch.chdir(both)
    for train, heldout in (
        (both, both / "b.jsonl"),
        (both, "../both/b.jsonl"),
        (both, root / "link.jsonl"),
        ("b.jsonl", both),
        ("../both", "b.jsonl"),
    ):
        with pytest.raises(ValueError, match="held-out data would be trained on") as raised:
            preflight("sft", sft(paths, train=train, heldout=heldout), 1)
        assert f"both read {both / 'b.jsonl'}:" in str(raised.value)
    (both / "c.jsonl").symlink_to(splits / "train.jsonl")
    with pytest.raises(ValueError, match=r"\(split train\) .* \(split not named\) both read .*train\.jsonl: held-out"):
        preflight("rl", rl(paths, data={"train": splits, "train_split": "train", "heldout": both}), 1)
    for heldout in ({"heldout": splits, "heldout_split": "validation"}, {"heldout": splits / "heldout.jsonl"}):
        assert preflight("sft", sft(paths, train=splits, train_split="train", **heldout), 1).notes == ()
    for train, heldout in (("b.jsonl", "../both/b.jsonl"), (both, "."), ("b.jsonl", root / "link.jsonl")):
        (note,) = preflight("sft", sft(paths, train=train, heldout=heldout), 1).notes
        assert note.startswith(said)
    hub = Path("owner/name")
    assert preflight("sft", sft(paths, train=hub, heldout=hub), 1).notes[0].startswith(said)
    assert preflight("sft", sft(paths, train=hub, heldout=hub, heldout_split="test"), 1).notes == ()


def test_a_name_of_the_hub_is_left_to_the_loader(paths):
    """Also one with a dot, which is no file's suffix."""
    for name in ("owner/name", "owner/name-v1.5"):
        assert preflight("sft", sft(paths, heldout=Path(name)), 1).numbers


def test_rl_that_would_outgrow_the_positions_of_any_role_is_refused(paths):
    """40 + 24 = 64 tokens just fit the actor's 64 positions; one more does not, and the critic has only 48."""
    assert preflight("rl", rl(paths), 1).numbers
    with pytest.raises(ValueError, match="max_position_embeddings") as raised:
        preflight("rl", rl(paths, rollout={"max_response_tokens": 25}), 1)
    assert str(raised.value) == (
        f"actor: data.max_prompt_tokens + rollout.max_response_tokens = 40 + 25 = 65 tokens, but {paths['model']} has "
        "max_position_embeddings = 64; lower either limit by 1 tokens or more"
    )
    short = paths["make"]("short", max_position_embeddings=48)
    with pytest.raises(ValueError, match=r"^critic: .* 40 \+ 24 = 64 tokens, .* = 48; lower either limit by 16 tokens"):
        preflight("rl", rl(paths, critic=role(paths, model=short)), 1)


def test_sft_may_have_limits_beyond_the_positions_because_its_data_may_be_shorter(paths):
    assert preflight("sft", sft(paths, max_prompt_tokens=500, max_response_tokens=500), 1).numbers


def test_generate_has_no_batch_arithmetic_and_is_checked_all_the_same(paths):
    tree = {"run": {"dir": "r"}, "actor": role(paths, tp=3), "data": {"train": paths["train"]}}
    with pytest.raises(ValueError, match="4 KV heads"):
        preflight("generate", GenerateConfig.model_validate(tree), 3)
    tree |= {"actor": role(paths), "rollout": {"max_response_tokens": 8}}
    with pytest.raises(ValueError, match=r"1024 \+ 8 = 1032 tokens"):
        preflight("generate", GenerateConfig.model_validate(tree), 2)
    tree["data"]["max_prompt_tokens"] = 8
    assert preflight("generate", GenerateConfig.model_validate(tree), 2).numbers == ()


def test_a_tokenizer_larger_than_a_role_s_vocabulary_is_refused(paths):
    """16 tokens; an id without an embedding would read a row of padding, in silence."""
    small = paths["make"]("small", vocab_size=15)
    with pytest.raises(ValueError, match=r"critic: the tokenizer of .* has 16 tokens, .*small has vocab_size = 15"):
        preflight("rl", rl(paths, critic=role(paths, model=small)), 1)


def test_a_misspelt_rule_is_refused_before_a_rank_starts(paths):
    with pytest.raises(ValueError, match="unknown reward rule 'exactmatch'"):
        preflight("rl", rl(paths, rewards=[{"kind": "rule", "rule": "exactmatch"}]), 1)


def test_experts_are_rolled_out_by_vllm(paths):
    mixture = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    actor = role(paths, model=paths["make"]("mixture", **mixture))
    for engine in ("vllm", "megatron"):
        assert preflight("rl", rl(paths, actor=actor, rollout={"engine": engine}), 1).numbers


def test_what_vllm_cannot_hold_is_refused(paths):
    """A parameter that its model lacks, a tp that does not divide; the Megatron engine takes the actor as it is."""
    biased = role(paths, model=paths["make"]("biased", model_type="qwen3", attention_bias=True))
    lacking = r"^rollout\.parallel\.tp = 1 of vLLM and .*vLLM's qwen3 has no parameter for .*rollout.engine=megatron"
    cases = [
        (biased, {}, 1, lacking),
        (role(paths), {"parallel": {"tp": 3}}, 3, r"^rollout\.parallel\.tp = 3 of vLLM .* do not divide by tp = 3"),
        (role(paths), {"parallel": {"tp": 2}}, 1, r"^rollout\.parallel\.tp = 2 does not divide the 1 ranks"),
    ]
    for actor, rollout, world_size, message in cases:
        train = {"mini_batch_samples": 12, "prompts_per_step": 6} if world_size == 3 else None
        assert preflight("rl", rl(paths, actor=actor, train=train), world_size).numbers
        with pytest.raises(ValueError, match=message):
            preflight("rl", rl(paths, actor=actor, train=train, rollout={"engine": "vllm", **rollout}), world_size)


def test_an_output_that_cannot_be_written_is_refused_before_the_start(paths, tmp_path):
    """A directory, data, what eval would ignore, and a run directory below a file. Not covered: permissions."""
    out = tmp_path / "out.jsonl"
    tree = {
        "run": {"dir": tmp_path / "run", "on_existing": "overwrite"},
        "actor": role(paths),
        "data": {"train": paths["train"], "max_prompt_tokens": 8},
        "rollout": {"engine": "megatron", "max_response_tokens": 8},
        "rewards": [{"kind": "rule", "rule": "exact_match"}],
    }
    cfg = GenerateConfig.model_validate(tree)
    out.write_text("{}")
    for command, changed, words in (
        ("generate", {"out": tmp_path}, "is a directory; name a file"),
        ("generate", {"out": paths["train"]}, "out = .* is data.train = .*, which this run reads; name another file"),
        ("eval", {"out": out}, "eval writes metrics and no responses; leave out away"),
        ("eval", {"run": cfg.run.model_copy(update={"dir": out / "run"})}, "lies below .*out.jsonl, which is a file"),
    ):
        with pytest.raises(ValueError, match=words):
            preflight(command, cfg.model_copy(update=changed), 1)
    assert preflight("generate", cfg.model_copy(update={"out": out}), 1).title == "generate"
    assert preflight("eval", cfg, 1).title == "eval"
