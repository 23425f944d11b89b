"""Models, data and reward functions that every run reads. Written here without megarlhf, so that two versions of it get
the same bytes."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

LAYERS = 2
MARKS = ("<|end|>", "<|start|>", "<|pad|>", "<|unknown|>")
END, START, PAD = 0, 1, 2
CHARACTERS = "0123456789+-=ĠĊabcdefghijklmnopqrstuvwxyz?"
"""Tokens of one character; a byte-level tokenizer writes a space and a line break as the letters Ġ and Ċ."""
MERGES = (("1", "0"), ("1", "1"), ("2", "0"))
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
RULES = '''"""Reward functions of the compared runs."""


def letters(prompt, response, fields):
    """A number between 0 and 1 that every character has a part in."""
    return sum(ord(character) % 7 for character in response) / (7 * max(1, len(response)))


def is_even(prompt, response, fields):
    """1 for half of all responses, otherwise 0."""
    return float(sum(map(ord, response)) % 2 == 0)


def has_digit(prompt, response, fields):
    """1 where the response has a digit, otherwise 0: groups of equal rewards are common."""
    return float(any(character.isdigit() for character in response))
'''


def write_inputs(directory: Path) -> None:
    """Everything that the runs read, in a new directory."""
    directory.mkdir(parents=True)
    (directory / "equality_rules.py").write_text(RULES, encoding="utf-8")
    write_models(directory)
    for name, records in make_records().items():
        write_lines(directory / f"{name}.jsonl", records)


def write_models(directory: Path) -> None:
    """Random models: `model`, `other` and `scorer` (a reward model) are Llamas, `qwen2` has biases and a tied head,
    `experts` is a Mixtral."""
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        LlamaConfig,
        MixtralConfig,
        Qwen2Config,
    )

    sizes: dict[str, Any] = {"vocab_size": len(MARKS) + len(CHARACTERS) + len(MERGES), "hidden_size": 64}
    sizes |= {"intermediate_size": 96, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"max_position_embeddings": 512, "bos_token_id": START, "eos_token_id": END, "pad_token_id": PAD}
    llama = LlamaConfig(**sizes, head_dim=32, tie_word_embeddings=False)  # vLLM on a CPU asks for heads of 32
    qwen2 = Qwen2Config(**{**sizes, "num_attention_heads": 2}, tie_word_embeddings=True)
    mixtral = MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2)
    named = {"model": llama, "other": llama, "qwen2": qwen2, "experts": mixtral}
    for seed, (name, config) in enumerate(named.items()):
        save_random(AutoModelForCausalLM.from_config(config), directory / name, seed)
    scorer = AutoModelForSequenceClassification.from_config(LlamaConfig(**sizes, head_dim=32, num_labels=1))
    save_random(scorer, directory / "scorer", len(named))


def save_random(model: Any, directory: Path, seed: int) -> None:
    """Fill a model of transformers with random weights, norms too, and save it in fp32 with the tokenizer."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            middle = 1.0 if parameter.ndim == 1 and "norm" in name else 0.0
            parameter.copy_(middle + 0.1 * torch.randn(parameter.shape, generator=generator))
    model.float().save_pretrained(directory)
    write_tokenizer(directory)


def write_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer of some characters, as transformers writes it, with a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    pieces = [*MARKS, *CHARACTERS, *("".join(merge) for merge in MERGES)]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(MERGES), unk_token=MARKS[3]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False, special=True) for mark in MARKS])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    end, start, pad, unknown = MARKS
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": start, "eos_token": end, "pad_token": pad}
    text = json.dumps({**settings, "unk_token": unknown})
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")


def make_records() -> dict[str, list[dict[str, Any]]]:
    """Sums, in the forms that the commands read; `..._held_out` are others of the same form."""
    numbers = random.Random(0)
    records: dict[str, list[dict[str, Any]]] = {}
    for suffix, count in (("", 48), ("_held_out", 12)):
        forms: dict[str, list[dict[str, Any]]] = {"answers": [], "pairs": [], "prompts": [], "chats": [], "texts": []}
        for _ in range(count):
            first, second = numbers.randrange(1000), numbers.randrange(100)
            prompt, answer, wrong = f"{first}+{second}=", str(first + second), str(first + second + 1)
            forms["answers"].append({"prompt": prompt, "response": answer})
            forms["pairs"].append({"prompt": prompt, "chosen": answer, "rejected": wrong + "0" * numbers.randrange(3)})
            forms["prompts"].append({"prompt": prompt, "answer": answer})
            forms["chats"].append({"messages": conversation(first, second)})
            forms["texts"].append({"text": f"the sum of {first} and {second} is {answer}"})
        records |= {form + suffix: rows for form, rows in forms.items()}
    return records


def conversation(first: int, second: int) -> list[dict[str, str]]:
    """Two questions about a sum with their answers."""
    texts = (f"what is {first}+{second}?", str(first + second), "and one more?", str(first + second + 1))
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


def write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """JSON lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def digest_of_files(directory: Path) -> str:
    """SHA-256 of the names and bytes of all files below a directory."""
    digest = hashlib.sha256()
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(directory)}:{len(content)}:".encode() + content)
    return digest.hexdigest()
