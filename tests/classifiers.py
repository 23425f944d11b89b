"""Tiny Hugging Face classifiers and reward models with tokenizers of their own: a token for each character."""

from pathlib import Path
from typing import Any

import torch

CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m['role'][0] }}]{{ m['content'] }}{{ eos_token if m['role'] == 'assistant' }}"
    "{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)
LETTERS = "0123456789+=abcdefghijklmnopqrstuvwxyz[] "


def write_tokenizer(
    directory: Path,
    *,
    special: tuple[str, ...] = ("<unk>", "<s>", "</s>", "<pad>"),
    letters: str = LETTERS,
    **keys: Any,
) -> Path:
    """One token a character, in the order of `letters` behind the special ones; begins with bos, as Llama's does. A
    pair is two segments behind one bos. `keys` are those of transformers' class."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocab = {token: n for n, token in enumerate([*special, *letters])}
    made = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    bos = vocab["<s>"]
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B:1", special_tokens=[("<s>", bos)]
    )
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    if "<pad>" in special:
        names["pad_token"] = "<pad>"
    PreTrainedTokenizerFast(tokenizer_object=made, **{**names, **keys}).save_pretrained(directory)
    return directory


def write_classifier(
    directory: Path, *, labels: tuple[str, ...] = ("LABEL_0",), seed: int = 0, tokenizer: dict[str, Any] | None = None,
    **config: Any,
) -> Path:  # fmt: skip
    """A Llama with a head of one number a label; a text of 64 tokens at most."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    write_tokenizer(directory, **(tokenizer or {}))
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    settings = {"vocab_size": 64, "max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": 3}
    names = {"id2label": dict(enumerate(labels)), "label2id": {name: n for n, name in enumerate(labels)}}
    model = LlamaForSequenceClassification(LlamaConfig(**{**sizes, **settings, **names, **config}))
    torch.nn.init.normal_(model.score.weight, std=0.5)
    model.save_pretrained(directory)
    return directory


def write_encoder(directory: Path, labels: tuple[str, ...] = ("bad", "good")) -> Path:
    """A BERT with segments, which is no decoder: its number comes from the first token."""
    from transformers import BertConfig, BertForSequenceClassification

    write_tokenizer(directory, model_input_names=["input_ids", "token_type_ids", "attention_mask"])
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    names = {"id2label": dict(enumerate(labels)), "label2id": {name: n for n, name in enumerate(labels)}}
    config = BertConfig(
        vocab_size=64, max_position_embeddings=64, initializer_range=0.3, pad_token_id=3, **sizes, **names
    )
    BertForSequenceClassification(config).save_pretrained(directory)
    return directory
