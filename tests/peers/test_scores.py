"""Rewards as TRL's GRPO has them: a reward model of ours, alone and in a batch, and what a function is given."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarlhf.rollout.rewards.batch import RewardBatch
from megarlhf.rollout.rewards.calls import call
from megarlhf.rollout.rewards.forms import NOT_GIVEN, form_of
from megarlhf.weights.checkpoint.conversion import HuggingFaceTarget, convert
from megarlhf.weights.checkpoint.open_checkpoint import open_checkpoint
from tests.classifiers import write_classifier
from tests.peers.reach import importable

pytestmark = pytest.mark.peers
PROMPTS, COMPLETIONS = ["1+1=", "12+34=", "7"], ["2</s>", "46</s>", "80</s>"]


def rewards_of_trl(reward: Any, tokenizer: Any, rows: list[dict[str, Any]], completions: list[Any]) -> list[float]:
    """`GRPOTrainer._calculate_rewards` for one model or function."""
    trainer_class = importable("trl.trainer.grpo_trainer").GRPOTrainer
    trainer: Any = trainer_class.__new__(trainer_class)
    settings = {
        "accelerator": SimpleNamespace(device=torch.device("cpu"), is_main_process=False),
        "reward_funcs": [reward],
        "reward_processing_classes": [tokenizer],
        "reward_func_names": ["ours"],
        "state": SimpleNamespace(global_step=0),
        "environments": None,
        "args": SimpleNamespace(device="cpu", past_index=-1, report_to=[]),
        "is_deepspeed_enabled": False,
        "chat_template_kwargs": {},
    }
    for name, value in settings.items():
        setattr(trainer, name, value)
    prompts, ids = [row["prompt"] for row in rows], [[n] for n in range(len(rows))]
    found: list[float] = trainer._calculate_rewards(rows, prompts, completions, ids)[:, 0].tolist()
    return found


def scores_of_trl(directory: Path, texts: range) -> list[float]:
    """Of some of the texts at once."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model.config.pad_token_id = tokenizer.pad_token_id  # as the trainer does
    rows = [{"prompt": PROMPTS[n]} for n in texts]
    return rewards_of_trl(model, tokenizer, rows, [COMPLETIONS[n] for n in texts])


def test_a_function_gets_what_trl_gives_it() -> None:
    """But for what TRL's trainer has to log with and to tell of itself."""
    given: list[dict[str, Any]] = []

    def reward(completions: list[Any], **others: Any) -> list[float]:
        given.append({"completions": completions, **others})
        return [0.5] * len(completions)

    asked = [[{"role": "user", "content": text}] for text in PROMPTS]
    columns = [{"answer": text, "level": n} for n, text in enumerate(COMPLETIONS)]
    said = [[{"role": "assistant", "content": text}] for text in COMPLETIONS]
    rows = [{"prompt": messages, **fields} for messages, fields in zip(asked, columns, strict=True)]
    assert rewards_of_trl(reward, None, rows, said) == [0.5] * 3
    batch = RewardBatch(PROMPTS, COMPLETIONS, [[]] * 3, [[0], [1], [2]], [True] * 3, columns, asked, range(3))
    assert [outcome.value for outcome in call(reward, form_of(reward), batch)] == [0.5] * 3
    theirs, ours = given
    assert {name: value for name, value in theirs.items() if name not in NOT_GIVEN} == ours


def test_the_scores_are_those_of_each_text_alone(tmp_path) -> None:
    """Of an export of a model that pads with its end of sequence; of that model they would be of other tokens."""
    from transformers import AutoTokenizer, LlamaForSequenceClassification

    base = write_classifier(tmp_path / "base", pad_token_id=2, eos_token_id=2, tokenizer={"pad_token": "</s>"})
    convert(open_checkpoint(base), tmp_path / "export", HuggingFaceTarget())
    model = LlamaForSequenceClassification.from_pretrained(base, dtype=torch.float32).eval()
    model.config.pad_token_id = 63  # which no text has
    tokenizer = AutoTokenizer.from_pretrained(base)
    texts = [prompt + completion for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True)]
    with torch.no_grad():
        rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        expected = [float(model(torch.tensor([row])).logits) for row in rows]
    together, alone = scores_of_trl(tmp_path / "export", range(3)), scores_of_trl(tmp_path / "export", range(1))
    assert [*together, *alone] == pytest.approx([*expected, expected[0]], abs=1e-4)
    assert scores_of_trl(base, range(3)) != pytest.approx(expected, abs=1e-3), "the fault is there"
