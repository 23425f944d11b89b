"""What `make bench-packing` trains on: a small Llama, prompts, responses of long-tailed or of equal length, a reward.

Everything follows from `Sizes` and a seed, so that each process makes its own copy. The tokenizer has a word per id.
The model never says end-of-sequence, so that a generated response ends by its length alone.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

Kind = Literal["long_tailed", "equal"]
SPECIAL = ("<pad>", "<unk>", "<s>", "</s>")
"""Ids 0 to 3; the words follow."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of the model and of one step."""

    hidden: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 704
    vocab: int = 2048
    prompts: int = 16
    """Prompts of a step."""
    per_prompt: int = 8
    """Responses to each."""
    mini_batches: int = 4
    """Optimizer steps of a step."""
    prompt_tokens: tuple[int, int] = (8, 40)
    """Shortest and longest prompt; equal lengths have their mean."""
    mean_response: int = 64
    max_response: int = 512
    sigma: float = 1.0
    """Of the logarithm of a response's length."""

    @property
    def samples(self) -> int:
        return self.prompts * self.per_prompt


REHEARSAL = Sizes(hidden=64, layers=2, heads=2, kv_heads=1, intermediate=96, vocab=256, prompts=4, per_prompt=4,
                  mini_batches=2, prompt_tokens=(3, 9), mean_response=8, max_response=32)  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """One step's prompts and responses as ids; sample n answers prompt n // per_prompt."""

    prompts: list[list[int]]
    responses: list[list[int]]

    @property
    def response_tokens(self) -> int:
        return sum(map(len, self.responses))

    @property
    def longest(self) -> int:
        """Of prompt and response together, in tokens."""
        per_prompt = len(self.responses) // len(self.prompts)
        return max(len(self.prompts[n // per_prompt]) + len(row) for n, row in enumerate(self.responses))

    def tokens(self) -> int:
        """Prompts, counted once for each response, and responses."""
        return len(self.responses) // len(self.prompts) * sum(map(len, self.prompts)) + self.response_tokens

    def facts(self) -> dict[str, Any]:
        """What a result says about it."""
        lengths = sorted(map(len, self.responses))
        return {
            "samples": len(lengths),
            "response_tokens": sum(lengths),
            "tokens": self.tokens(),
            "response_length": {
                "mean": statistics.mean(lengths),
                "median": statistics.median(lengths),
                "min": lengths[0],
                "max": lengths[-1],
            },
            "longest_row": self.longest,
            "tokens_in_rows_of_the_longest": len(lengths) * self.longest,
        }


def make_workload(kind: Kind, sizes: Sizes, seed: int = 0) -> Workload:
    """Lengths are the distribution's own quantiles in random order, so that no seed is luckier than another."""
    rng = random.Random(seed)
    low, high = sizes.prompt_tokens
    if kind == "equal":
        prompt_lengths = [(low + high) // 2] * sizes.prompts
        response_lengths = [sizes.mean_response] * sizes.samples
    else:
        prompt_lengths = [low + (high - low) * n // max(sizes.prompts - 1, 1) for n in range(sizes.prompts)]
        normal = statistics.NormalDist(math.log(sizes.mean_response) - sizes.sigma**2 / 2, sizes.sigma)
        quantiles = (math.exp(normal.inv_cdf((n + 0.5) / sizes.samples)) for n in range(sizes.samples))
        response_lengths = [min(max(round(length), 1), sizes.max_response) for length in quantiles]
        rng.shuffle(prompt_lengths)
        rng.shuffle(response_lengths)

    def ids(length: int) -> list[int]:
        return [rng.randrange(len(SPECIAL), sizes.vocab) for _ in range(length)]

    return Workload([ids(length) for length in prompt_lengths], [ids(length) for length in response_lengths])


def text_of(ids: list[int]) -> str:
    """The text that the tokenizer makes these ids of, and of these ids."""
    return " ".join(f"w{n}" for n in ids)


def reward(prompt: str, response: str, fields: Mapping[str, Any]) -> float:
    """A number in [0, 1) that only the text decides: both sides train on the same rewards."""
    return zlib.crc32(response.strip().encode()) / 2**32


def _never_end(model: Any, eos: int) -> None:
    """Channel 0 carries a constant through all layers, and only the logit of `eos` reads it: as a bias of about -12
    where the others' deviation is below 1."""
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[eos, 0] = -20.0


def write_model(directory: Path, sizes: Sizes, seed: int = 0) -> Path:
    """A random Llama in fp32, as Hugging Face writes it, with its tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        head_dim=sizes.hidden // sizes.heads,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        max_position_embeddings=sizes.prompt_tokens[1] + sizes.max_response,
        initializer_range=0.05,
        bos_token_id=2,
        eos_token_id=3,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    _never_end(model, config.eos_token_id)
    model.save_pretrained(directory)
    vocabulary = {name: n for n, name in enumerate(SPECIAL)}
    vocabulary |= {f"w{n}": n for n in range(len(SPECIAL), sizes.vocab)}
    special = [
        {"id": vocabulary[name], "content": name, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for name in SPECIAL
    ]
    tokenizer = {
        "version": "1.0",
        "added_tokens": special,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
    names = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names})
    )
    return directory
