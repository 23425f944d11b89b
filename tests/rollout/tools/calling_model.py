"""A tiny model that calls tools: each call of a list is one token of its vocabulary, drawn at random."""

from collections.abc import Sequence
from pathlib import Path

import torch

from tests.chat_model import END, byte_level_bpe, write_chat_model

STRENGTH = 60.0


def write_calling_model(directory: Path, texts: Sequence[str]) -> Path:
    """A model whose turns are one of `texts`, each as likely as the others, and the end of the turn behind it.

    Nothing but the embedding of the last token reaches the head: a turn begins behind a line break.
    """
    import json

    from tokenizers import AddedToken, Tokenizer
    from transformers import LlamaForCausalLM

    write_chat_model(directory, tie_word_embeddings=False, max_position_embeddings=2048)
    file = directory / "tokenizer.json"
    tokenizer = Tokenizer.from_str(file.read_text())
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in texts])
    tokenizer.save(str(file))
    template = (Path(__file__).parents[3] / "configs/demo-tools/chat_template.jinja").read_text()
    (directory / "chat_template.jinja").write_text(template)
    model = LlamaForCausalLM.from_pretrained(directory)
    model.resize_token_embeddings(tokenizer.get_vocab_size(), mean_resizing=False)
    (line_break,) = byte_level_bpe().encode("\n").ids
    spoken = [tokenizer.token_to_id(text) for text in texts]
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
        torch.nn.init.normal_(embedding, generator=torch.Generator().manual_seed(0))
        directions = torch.nn.functional.normalize(embedding, dim=1)
        head.mul_(0.01)
        head[spoken] = STRENGTH / 8 * directions[line_break]
        head[END] = STRENGTH / 8 * directions[spoken].sum(0)
    model.save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    assert config["vocab_size"] == tokenizer.get_vocab_size()
    return directory
