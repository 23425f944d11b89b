"""Texts on which tokenizers differ, drawn at random, and small config.json files beside which tokenizers are read."""

from __future__ import annotations

import json
import random
from pathlib import Path

WORDS = [
    "the", "of", "and", "def", "return", "x", "=", "y", "+", "1234567", "3.14", "don't", "I'll", "HELLO", "Straße",
    "naïve", "你好", "世界", "こんにちは", "안녕", "привет", "שלום", "مرحبا", "नमस्ते", "สวัสดี", "🇩🇪",
    "👩\u200d👧", "e\u0301", "\u200d", "\ufe0f", "https://a.b/c?d=e&f", "<tag>", "</tag>", '{"k":',
    "[1,2]}", "//", "/*", "...", "--",
]  # fmt: skip
SEPARATORS = [*[" "] * 8, "  ", "   ", "\n", "\n\n", "\t", "\r\n", " \n", "\n  ", "\u00a0", "\u3000", ""]
BLOCKS = [
    *[(0x20, 0x7E)] * 6, (0xA0, 0x24F), (0x300, 0x36F), (0x370, 0x4FF), (0x590, 0x6FF), (0x900, 0x97F), (0xE00, 0xE7F),
    (0x3040, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0x2000, 0x206F), (0x1F300, 0x1F6FF), (0xFB00, 0xFDFF),
    (0xFF00, 0xFFEF),
]  # fmt: skip
"""Of Unicode: Latin, combining characters, Greek and Cyrillic, Hebrew and Arabic, Devanagari, Thai, ..., emoji."""


def draw(count: int, seed: int = 0) -> list[str]:
    """Words, runs of characters of one block, and white space of all kinds between them."""
    numbers = random.Random(seed)
    texts = []
    for _ in range(count):
        parts = []
        for _ in range(numbers.randint(1, 12)):
            if numbers.random() < 0.6:
                parts.append(numbers.choice(WORDS))
            else:
                low, high = numbers.choice(BLOCKS)
                parts.append("".join(chr(numbers.randint(low, high)) for _ in range(numbers.randint(1, 6))))
            parts.append(numbers.choice(SEPARATORS))
        texts.append("".join(parts))
    return texts


def write_config(directory: Path, model_type: str, **keys: object) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    sizes = {
        "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2,
        "num_hidden_layers": 2, "vocab_size": 300_000,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps({"model_type": model_type, **sizes, **keys}))
    return directory
