"""Records that stand in have the lengths that were asked for, as the program reads them with the stand-in tokenizer."""

import json
from pathlib import Path
from typing import Any

import pytest

from megarlhf.config import RLConfig, RMConfig, SFTConfig, describe_sources
from megarlhf.data.tokenizers.tokenizer import load_tokenizer
from megarlhf.rehearsal.fakes.inputs import LETTERS, SPECIAL, stand_in, write_tokenizer
from megarlhf.rehearsal.fakes.lengths import Constant, Given
from megarlhf.trainers.supervised.loop import load_samples
from megarlhf.trainers.supervised.rm import RewardModelling
from megarlhf.trainers.supervised.sft import SupervisedFineTuning
from megarlhf.weights.checkpoint.dtype import resolve_dtype
from tests.refuses import missing_names

CONFIG = {
    "model_type": "llama", "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}  # fmt: skip


def tree(directory: Path, role: str) -> dict[str, Any]:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return {
        "run": {"dir": str(directory / "run")},
        role: {"model": {"path": str(directory), "random_init": True}},
        "data": {"train": "nowhere.jsonl", "max_prompt_tokens": 40, "max_response_tokens": 60},
        "train": {"num_steps": 3, "mini_batch_samples": 50, "micro_batch_samples": 2},
    }


def test_every_record_is_used_and_has_its_length(tmp_path) -> None:
    """Also the longest that are allowed, and whatever letters they consist of."""
    cfg = SFTConfig.model_validate(tree(tmp_path / "model", "actor"))
    lengths = {"prompt_lengths": Given([2, 17, 40, 99]), "response_lengths": Given([2, 33, 60, 99])}
    stood = stand_in(cfg, tmp_path / "standing_in", steps=3, **lengths)
    train, validation, notes = load_samples(SupervisedFineTuning(stood.cfg))
    assert (len(train), validation) == (150, [])
    (note,) = notes
    assert not missing_names(note, describe_sources(stood.cfg.data.train), "150 records")
    assert {sample.prompt_length for sample in train} == {2, 17, 40}
    assert {len(sample.tokens) - sample.prompt_length for sample in train} == {2, 33, 60}


def test_pairs(tmp_path) -> None:
    cfg = RMConfig.model_validate(tree(tmp_path / "model", "reward_model"))
    stood = stand_in(cfg, tmp_path / "standing_in", steps=3, prompt_lengths=Constant(20), response_lengths=Constant(10))
    train, _, _ = load_samples(RewardModelling(stood.cfg))
    assert len(train) == 150
    sides = [(sample.prompt_tokens, sample.chosen_tokens, sample.rejected_tokens) for sample in train]
    assert {tuple(map(len, side)) for side in sides} == {(20, 10, 10)}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "gpt2", "opt"])
def test_a_letter_is_a_token_whatever_the_family(family, tmp_path) -> None:
    """For some of them transformers makes a tokenizer of another kind."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode(LETTERS) == list(range(len(SPECIAL), len(SPECIAL) + len(LETTERS)))
    assert tokenizer.encode(LETTERS, continuation=True) == tokenizer.encode(LETTERS)
    assert tokenizer.decode(tokenizer.encode("aZ")) == "aZ"
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, 0)


@pytest.mark.parametrize("lengths", [None, Constant(12)])
def test_a_tokenizer_that_is_there_reads_data_that_is_there_only(lengths, tmp_path, models, data) -> None:
    """Lengths that are asked for are those of records that stand in, which the stand-in tokenizer reads."""
    given = tree(tmp_path / "model", "actor")
    given["actor"]["model"] = {"path": str(models["plain"])}
    given["data"]["train"] = str(data["sft"])
    given["train"]["mini_batch_samples"] = 20
    cfg = SFTConfig.model_validate(given)
    stood = stand_in(cfg, tmp_path / "standing_in", steps=3, prompt_lengths=lengths, response_lengths=None)
    used = stood.cfg.actor.model.path == cfg.actor.model.path, stood.cfg.data.train == cfg.data.train
    assert used == ((True, True) if lengths is None else (False, False))
    if lengths is not None:
        train, _, _ = load_samples(SupervisedFineTuning(stood.cfg))
        assert {sample.prompt_length for sample in train} == {12}
        assert any("not used" in note for note in stood.notes)


def test_a_stored_dtype_is_kept(tmp_path, models) -> None:
    """Weights may say another dtype than config.json (here: none), and a directory that stands in has no weights."""
    given = tree(tmp_path / "model", "actor")
    given["actor"]["model"] = {"path": str(models["plain"])}
    cfg = SFTConfig.model_validate(given)
    stored = resolve_dtype("actor", cfg.actor.model, "lm")
    assert stored.why == "as stored"
    stood = stand_in(cfg, tmp_path / "standing_in", steps=1, prompt_lengths=Constant(9), response_lengths=None)
    assert stood.cfg.actor.model.path != cfg.actor.model.path
    assert stood.cfg.actor.model.dtype == stored.name


@pytest.mark.parametrize("command", ["sft", "rm"])
def test_lengths_of_responses_alone_make_data_stand_in(command, tmp_path, models, data) -> None:
    """Of these commands they are data; what is given must not be without effect. Held-out data are said to be left
    out."""
    role, config = {"sft": ("actor", SFTConfig), "rm": ("reward_model", RMConfig)}[command]
    given = tree(tmp_path / "model", role)
    given[role]["model"] = {"path": str(models["plain"])}
    given["data"] |= {"train": str(data["sft" if command == "sft" else "pairs"]), "validation": str(data["prompts"])}
    stood = stand_in(
        config.model_validate(given), tmp_path / "standing_in", steps=1, prompt_lengths=None,
        response_lengths=Constant(11),
    )  # fmt: skip
    names = ("not used", "50 records stand in", "11 tokens", f"data.validation = {data['prompts']} is left out")
    assert not missing_names(" ".join(stood.notes), *names)


def test_held_out_prompts_of_rl_are_left_out_where_its_data_are_read(tmp_path, models, data) -> None:
    """What a reward model says of them is a number that a rehearsal does not know."""
    given = tree(tmp_path / "model", "actor")
    given["actor"]["model"] = {"path": str(models["plain"])}
    given["data"] = {"train": str(data["prompts"]), "validation": str(data["prompts"]), "max_prompt_tokens": 16}
    given["train"] |= {"prompts_per_step": 4, "mini_batch_samples": 4}
    given |= {"rewards": [{"kind": "rule", "rule": "exact_match"}], "eval": {"every": 1}}
    given["algo"] = {"advantage": "reinforce"}
    cfg = RLConfig.model_validate(given)
    stood = stand_in(cfg, tmp_path / "standing_in", steps=1, prompt_lengths=None, response_lengths=Constant(3))
    assert (stood.cfg.data.train, stood.cfg.data.validation) == (cfg.data.train, None)
    assert f"data.validation = {data['prompts']} is left out" in " ".join(stood.notes)


def test_built_in_code_takes_the_place_of_own_code(tmp_path, models, data) -> None:
    """The same roles are built: a critic where the own advantage reads values. The user's code computes with numbers,
    which a rehearsal does not have."""
    here, algo = "tests.distributed.own_functions:", {"advantage": "gae", "policy_loss": "clip", "ratio": "token"}
    given = tree(tmp_path / "model", "actor")
    given["actor"]["model"] = {"path": str(models["plain"])}
    given["critic"] = {"model": {"path": str(models["plain"]), "fresh_head": True}}
    given["data"] = {"train": str(data["prompts"]), "max_prompt_tokens": 16}
    given["train"] |= {"prompts_per_step": 4, "mini_batch_samples": 4, "sampler": f"{here}first_ones"}
    given |= {"rewards": [{"kind": "rule", "rule": "exact_match"}], "observe": {"observers": [f"{here}Counter"]}}
    own = {key: here + name for key, name in algo.items()}
    given["algo"] = own | {"kl": {"coef": 0.1, "estimator": f"{here}k1"}}
    cfg = RLConfig.model_validate(given)
    stood = stand_in(cfg, tmp_path / "in", prompt_lengths=None, response_lengths=None, steps=1)
    assert "own_functions" not in stood.cfg.model_dump_json()
    assert stood.cfg.roles().keys() == cfg.roles().keys()
    assert stood.cfg.algo.model_dump(include=set(algo)) == algo
    assert sum("is not rehearsed" in note for note in stood.notes) == 5
