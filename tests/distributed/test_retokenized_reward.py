"""A reward model with another tokenizer than the actor's, against transformers on the text; and in a run.

Two reward models compute the same of the same text: the second's tokenizer has its ids in another order, and its rows
of the embedding stand in that order.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from megarlhf.columns import Ragged
from megarlhf.config import MicroBatchConfig, RewardConfig, RoleConfig
from megarlhf.data.samples.encoders import PromptSample
from megarlhf.data.tokenizers.tokenizer import load_tokenizer
from megarlhf.experience import Experience
from megarlhf.observe.records.metrics import read_metrics
from megarlhf.runtime import Runtime
from tests.classifiers import CHAT_TEMPLATE, LETTERS, write_classifier, write_tokenizer
from tests.command import argv_of
from tests.distributed.test_rl_layouts import config
from tests.refuses import command_refuses, lines_naming, refuses
from tests.tables import make_rollouts

TEXTS = (("1+2=", "3", True), ("hello ", "world and you", False), ("12+34=", "46", True), ("x", "", True))
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """`actor` writes in the tokens of `same`; `other` is `same` in other tokens."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    root = tmp_path_factory.mktemp("retokenized")
    same = write_classifier(root / "same", num_key_value_heads=2, tokenizer={"chat_template": CHAT_TEMPLATE})
    reversed_letters = {"special": SPECIAL, "letters": LETTERS[::-1], "chat_template": CHAT_TEMPLATE}
    other = write_tokenizer(root / "other", **reversed_letters)
    model = LlamaForSequenceClassification.from_pretrained(same)
    first, second = (AutoTokenizer.from_pretrained(path).get_vocab() for path in (same, other))
    rows = model.model.embed_tokens.weight.data
    moved = rows.clone()
    for token, place in second.items():
        moved[place] = rows[first[token]]
    assert not torch.equal(rows, moved)
    model.model.embed_tokens.weight.data = moved
    model.save_pretrained(other)
    torch.manual_seed(5)
    actor = write_tokenizer(root / "actor", chat_template=CHAT_TEMPLATE)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "vocab_size": 64}
    LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.1, bos_token_id=1, eos_token_id=2)).save_pretrained(actor)
    return {"actor": actor, "same": same, "other": other}


def scores(
    runtime: Runtime, models: dict[str, Path], name: str, parallel: dict[str, int], micro: dict[str, int], **keys: Any
) -> dict[str, Any]:
    """Of TEXTS, written by the actor's tokenizer: by text, and directly by the actor's ids."""
    from megarlhf.models.role import build_role
    from megarlhf.parallel.mesh import GroupCache
    from megarlhf.rollout.rewards.score import local_reward_batch
    from megarlhf.trainers.experience.retokenize import retokenized, retokenizer_of
    from megarlhf.trainers.experience.rewards import model_scores

    tokenizer = load_tokenizer(models["actor"])
    section = RoleConfig.model_validate({"model": {"path": str(models[name])}, "parallel": parallel})
    role = build_role("reward_model", section, "scalar", GroupCache(runtime), seed=0)
    prompts = [PromptSample([1, *tokenizer.encode(p)], p, {}, n) for n, (p, _, _) in enumerate(TEXTS)]
    rows = [torch.tensor(tokenizer.encode(r, continuation=True) + [2] * done) for _, r, done in TEXTS]
    responses = Ragged.from_rows(rows, torch.int64)
    finished = torch.tensor([done for _, _, done in TEXTS])
    rollouts = make_rollouts(responses, Ragged(torch.zeros(responses.num_tokens), responses.lengths_N), finished)
    experience = Experience(tuple(torch.tensor(p.tokens) for p in prompts), torch.arange(len(TEXTS)), rollouts)
    reward, batching = RewardConfig(kind="model", retokenize=True, **keys), MicroBatchConfig(**micro)
    batch = local_reward_batch(prompts, rollouts, tokenizer)
    written, cut = retokenized("judge", experience, batch, retokenizer_of(role, reward, batching))
    return {
        "by_text": model_scores(role, written, batching).tolist(),
        "directly": model_scores(role, experience, batching).tolist(),
        "lengths": written.sequences.lengths_N.tolist(),
        "version_lengths": written.rollouts.versions.per_token().lengths_N.tolist(),
        "response_lengths": written.response_lengths_N.tolist(),
        "cut": int(cut.sum()),
    }


def scores_cut_at_12(runtime: Runtime, *args: Any) -> dict[str, Any]:
    return scores(runtime, *args, max_tokens=12, too_long="cut")


@pytest.fixture(scope="module")
def expected(models) -> list[float]:
    """transformers' score of each text, by the tokens of `same`."""
    from transformers import LlamaForSequenceClassification

    tokenizer = load_tokenizer(models["same"])
    model = LlamaForSequenceClassification.from_pretrained(models["same"], dtype=torch.float32).eval()
    model.config.pad_token_id = None
    found = []
    for prompt, response, finished in TEXTS:
        tokens = [1, *tokenizer.encode(prompt + response), *[2] * finished]
        with torch.no_grad():
            found.append(float(model(torch.tensor([tokens])).logits[0, 0]))
    assert max(found) - min(found) > 0.1
    return found


@pytest.mark.parametrize(
    "world_size, parallel, micro",
    [
        (1, {}, {"micro_batch_samples": 2}),
        (2, {"tp": 2}, {"max_tokens_per_micro_batch": 32}),
        (2, {"pp": 2}, {"max_tokens_per_micro_batch": 32}),
        (2, {}, {"micro_batch_samples": 2}),
        (4, {"tp": 2, "pp": 2}, {"micro_batch_samples": 1}),
    ],
    ids=["one", "tp2 packed", "pp2 packed", "dp2", "tp2pp2"],
)
def test_the_score_is_that_of_the_text_at_every_layout(ranks, models, expected, world_size, parallel, micro) -> None:
    """Of a reward model with other tokens; with the actor's own tokens it is what the actor's ids give."""
    for rank in ranks.run(world_size, scores, models, "other", parallel, micro):
        assert rank["by_text"] == pytest.approx(expected, abs=1e-5)
        assert rank["directly"] != pytest.approx(expected, abs=1e-2), "the actor's ids mean something else to it"
    same = ranks.run(world_size, scores, models, "same", parallel, micro)[0]
    assert same["by_text"] == same["directly"] == pytest.approx(expected, abs=1e-5)


def test_texts_over_the_limit_are_refused_by_name_or_cut_and_counted(ranks, models) -> None:
    """20 tokens of the second text; the packed micro-batch is a limit too."""
    packed = {"max_tokens_per_micro_batch": 12}
    found = ranks.run(2, scores_cut_at_12, models, "other", {"tp": 2}, {"max_tokens_per_micro_batch": 32})
    assert found[0]["lengths"] == [7, 12, 10, 3]
    assert (
        found[0]["version_lengths"] == found[0]["response_lengths"] == [0] * 4
    )  # alone with its prompt, a text is all prompt
    assert found[0]["cut"] == found[1]["cut"] == 1
    with refuses("reward 'judge'", "sample 1", "prompt 'hello '", "20 tokens", "12", error=AssertionError):
        ranks.run(2, scores, models, "other", {"tp": 2}, packed)


def test_a_run_at_tp2_with_another_tokenizer_and_a_classifier_of_the_same_weights(
    ranks, models, data, tmp_path
) -> None:
    """Megatron's score at TP2, packed, by the other tokenizer, and transformers' score on each rank agree. Without
    `retokenize` the tokenizer is refused."""
    roles = {"plain": models["actor"], "other": models["other"]}
    cfg = config(roles, data["prompts"], {"tp": 2}, advantage="group_relative")
    del cfg["critic"]
    del cfg["train"]["micro_batch_samples"]
    cfg["run"] = {"dir": str(tmp_path / "run")}
    cfg["train"] |= {"num_steps": 2, "epochs_per_step": 1, "max_tokens_per_micro_batch": 48}
    judge = {"kind": "classifier", "path": str(models["same"]), "append_eos": True, "name": "judge"}
    cfg["rewards"] = [{"kind": "model", "retokenize": True}, judge]
    argv = argv_of("rl", cfg, tmp_path / "cfg.yaml")
    said = ranks.run(2, "command", *argv)[0]
    assert lines_naming(said, "reward_model", "text", "tokenizer")
    rows = [row for row in read_metrics(tmp_path / "run") if row["step"]]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["reward/model_mean"] == pytest.approx(row["reward/judge_mean"], abs=1e-5)
        assert row["reward/model_std"] == pytest.approx(row["reward/judge_std"], abs=1e-5)
        assert row["reward/model_std"] > 1e-3
        assert "reward/model_truncated" not in row
    without = [*argv, "rewards=[{kind: model}]", f"run.dir={tmp_path / 'x'}"]
    command_refuses(ranks, without, "token 0", "'<unk>'", "'<s>'", "retokenize: true", world=2)
