"""What `make bench-trl` trains on: models, prompts of a step, and sizes of supervised mini-batches.

Prompts are those of the list task (`trl_task.py`). Texts of SFT and pairs of the reward model are the ids of
`packing_workload.py` in the model's vocabulary: of what they say, neither side's time depends.
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.packing_workload import Kind, Sizes, text_of, write_model
from benchmarks.trl_task import RULE, read_records, write_records, write_task
from megarlhf.resume.points.file_digest import digest_of_directory

Command = Literal["grpo", "sft", "rm"]
SUPERVISED = {
    "sft": Sizes(vocab=49152, prompts=32, per_prompt=1, mini_batches=1, prompt_tokens=(16, 48)),
    "rm": Sizes(vocab=49152, prompts=16, per_prompt=2, mini_batches=1, prompt_tokens=(16, 48)),
}
"""Of a mini-batch of 32 texts, and of one of 16 pairs; responses have 64 tokens, or lognormally so on average."""
TINY = Sizes(hidden=64, layers=2, heads=2, kv_heads=1, intermediate=96, vocab=256, prompts=4, per_prompt=2,
             mini_batches=1, prompt_tokens=(3, 9), mean_response=8, max_response=32)  # fmt: skip
WORDS_RULE = "benchmarks.packing_workload:reward"
CHAT = "{% for message in messages %}w10 {{ message['content'] }} w11 {% endfor %}"
CHAT += "{% if add_generation_prompt %}w12{% endif %}"


@dataclass(frozen=True)
class Step:
    """Of GRPO: prompts, samples and rule."""

    prompts: Path
    test: Path
    """Prompts for figures."""
    rule: str
    per_prompt: int
    max_response: int
    max_prompt: int
    """Tokens, at most."""
    num_prompts: int
    """Of a step; the file is read again and again."""

    @property
    def samples(self) -> int:
        return self.num_prompts * self.per_prompt


@dataclass(frozen=True)
class Data:
    """Of one run of the benchmark."""

    model: Path
    """A language model, as Hugging Face writes it."""
    reward_model: Path
    """The same with a scalar head, that both sides begin with."""
    steps: dict[Kind, Step]
    supervised: dict[str, Sizes]


def prepare(directory: Path, model: Path, num_prompts: int = 8) -> Data:
    """Of a real model. `directory`: for what is made of it; a reward model that is there is taken."""
    task = write_task(directory / "task")
    records = read_records(task.train)
    mixed = write_records(directory / "prompts_long_tailed.jsonl", one_of_each(records, "what")[:num_prompts])
    equal = write_records(directory / "prompts_equal.jsonl", of_one_length(records, model)[:num_prompts])
    steps: dict[Kind, Step] = {
        kind: step_of(path, task.test, RULE, num_prompts) for kind, path in (("long_tailed", mixed), ("equal", equal))
    }
    scored = directory / f"reward-model-{digest_of_directory(model)[:12]}"
    return Data(model, with_scalar_head(model, scored), steps, SUPERVISED)


def step_of(prompts: Path, test: Path, rule: str, num_prompts: int = 8) -> Step:
    """As all of the benchmark's on a real model."""
    return Step(prompts, test, rule, per_prompt=8, max_response=64, max_prompt=96, num_prompts=num_prompts)


def prepare_tiny(directory: Path) -> Data:
    """Of a tiny random model with a chat template, for rehearsals."""
    model = write_tiny_model(directory / "model")
    rows = [{"prompt": text_of([*range(20, 20 + length)]), "answer": length} for length in (3, 5, 4, 6)]
    mixed = write_records(directory / "prompts_long_tailed.jsonl", rows)
    rows = [{"prompt": text_of([first, first + 1, first + 2]), "answer": first} for first in (20, 30, 40, 50)]
    equal = write_records(directory / "prompts_equal.jsonl", rows)
    steps: dict[Kind, Step] = {
        kind: Step(path, mixed, WORDS_RULE, per_prompt=4, max_response=8, max_prompt=16, num_prompts=4)
        for kind, path in (("long_tailed", mixed), ("equal", equal))
    }
    sizes = {"sft": dataclasses.replace(TINY, per_prompt=1), "rm": TINY}
    return Data(model, with_scalar_head(model, directory / "reward-model"), steps, sizes)


def write_tiny_model(directory: Path) -> Path:
    """`packing_workload.write_model` with a chat template; it has room for a prompt in it."""
    write_model(directory, dataclasses.replace(TINY, prompt_tokens=(3, 32)))
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": CHAT}))
    return directory


def one_of_each(records: Sequence[dict[str, Any]], column: str) -> list[dict[str, Any]]:
    """The first record of each value of a column."""
    return list({record[column]: record for record in reversed(records)}.values())


def of_one_length(records: Sequence[dict[str, Any]], model: Path) -> list[dict[str, Any]]:
    """Those whose prompts have the length in tokens that most have."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model), local_files_only=True)
    by_length = defaultdict(list)
    for record in records:
        message = [{"role": "user", "content": record["prompt"]}]
        ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)["input_ids"]
        by_length[len(ids)].append(record)
    return max(by_length.values(), key=len)


def with_scalar_head(model: Path, directory: Path) -> Path:
    """The model with a random scalar head, as transformers writes it; made where it is missing."""
    if (directory / "config.json").is_file():
        return directory
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(0)
    made = AutoModelForSequenceClassification.from_pretrained(str(model), num_labels=1, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(str(model), local_files_only=True)
    made.config.pad_token_id = tokenizer.pad_token_id
    part = directory.with_name(f"{directory.name}.part")
    made.save_pretrained(part)
    tokenizer.save_pretrained(part)
    part.rename(directory)
    return directory
