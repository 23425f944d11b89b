"""A small stand-in of the chat demo's model: a byte-level BPE that is trained here, a chat template, random weights."""

import functools
import json
from pathlib import Path
from typing import Any

import torch

from tools.demo_chat.make_data import QUESTIONS
from tools.demo_chat.words import FAMILIAR

MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SYSTEM = "You are a helpful AI assistant"
TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}<|im_start|>system\n"
    + SYSTEM
    + "<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As SmolLM2's: a system message of its own where there is none, and a line break behind each end of a turn."""
END = 2
"""The token that ends a turn."""
VOCABULARY = 512


@functools.cache
def byte_level_bpe(vocabulary: int = VOCABULARY) -> Any:
    """A `tokenizers.Tokenizer` trained on the demo's words and questions; its three marks come first."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    cut = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    made.pre_tokenizer = pre_tokenizers.Sequence(cut)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(mark, normalized=False, special=True) for mark in MARKS],
        show_progress=False,
    )
    words = [", ".join(items) for items in FAMILIAR.values()]
    paragraphs = ["a.\n\n\nb"] * 20  # line breaks become one token
    made.train_from_iterator([SYSTEM, *words, *QUESTIONS.read_text().splitlines(), *paragraphs] * 2, trainer)
    return made


def write_chat_model(directory: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Two layers in SmolLM2's shape: 9 heads, 3 KV heads, a tied head. vLLM on a CPU asks for heads of 32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = byte_level_bpe()
    torch.manual_seed(seed)
    shape: dict[str, Any] = {"hidden_size": 72, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32}
    shape |= {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    shape |= {"max_position_embeddings": 1024}
    ends = {"bos_token_id": 1, "eos_token_id": END, "pad_token_id": END}
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        initializer_range=0.08,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        **(shape | ends | changes),
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    write_chat_tokenizer(directory)
    return directory


def write_chat_tokenizer(directory: Path) -> None:
    """The tokenizer's files, as a released model has them."""
    directory.mkdir(parents=True, exist_ok=True)
    byte_level_bpe().save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    known = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    known |= {"pad_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(known))


def write_silent_model(directory: Path) -> Path:
    """The same, but whatever it is asked it ends its answer at once: behind a line break, where answers begin, the end
    of the turn is by far the likeliest token. Nothing but the embedding reaches the tied head."""
    from transformers import LlamaForCausalLM

    write_chat_model(directory)
    model = LlamaForCausalLM.from_pretrained(directory)
    (line_break,) = byte_level_bpe().encode("\n").ids
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding = model.model.embed_tokens.weight
        embedding[END] = 60 * embedding[line_break]
    model.save_pretrained(directory)
    return directory
