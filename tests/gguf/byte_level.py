"""Byte-level tokenizers trained here, that cut text as well-known ones do; written as their tokenizer.json is."""

from __future__ import annotations

import functools
from typing import Any

from tests.gguf.gguf_files import MARKS

CORPUS = [
    "The answer is 37 + 48 = 85, isn't it? The answers are 1234567890.",
    "What is the capital of France? The capital of France is Paris.",
    "def add(a, b):\n    return a + b  # they're DON'T we'll\n\n\n",
    "naïve café 日本語 नमस्ते ١٢٣ ½ 🙂",
    "  two   spaces\tand tabs\r\n",
]
SIZE = 340

TEXTS = [
    *CORPUS, "", " ", "\n\n \n", "x\u00a0y\u3000z",
    "cafe\u0301 e\u0301e\u0301 \u212b \ufb01",  # combining marks, which NFC composes
    "١٢٣٤ 2024-12-31 3.14159e-10 ½¾ ²³", "🙂\u200d♂️ 👩\u200d👩\u200d👧 \U00010348", "I'll DON'T we'RE 'tis ''s",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "a<|im_end|>b <|im_end|> c<|endoftext|>",
    "<|im_start <|im_end| >", "http://a.b/c?d=e&f=%20#g\t\t\\n {}[]()<>", "\x00\x01\x7f \ufffd \ue000", "a" * 36,
]  # fmt: skip


@functools.cache
def trained(cut: str) -> Any:
    """A `tokenizers.Tokenizer` that was trained with this cut, its marks first."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    made = Tokenizer(models.BPE(ignore_merges=cut == "llama-bpe"))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut in ("smollm", "gpt-2"))
    before = {
        "smollm": [pre_tokenizers.Digits(individual_digits=True)],
        "gpt-2": [],
        "qwen2": [pre_tokenizers.Split(Regex(_pattern("qwen2")), "isolated")],
        "llama-bpe": [pre_tokenizers.Split(Regex(_pattern("llama-bpe")), "isolated")],
    }[cut]
    made.pre_tokenizer = pre_tokenizers.Sequence([*before, byte_level])
    made.decoder = decoders.ByteLevel()
    if cut == "qwen2":
        made.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(mark, normalized=False, special=True) for mark in MARKS],
        show_progress=False,
    )
    made.train_from_iterator(CORPUS * 3, trainer)
    return made


def _pattern(cut: str) -> str:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    return str(GGUF_PRE_TOKENIZER_SPLITS[cut])
