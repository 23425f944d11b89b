"""Chat templates in the style of well-known models, and a tokenizer of one id a character for them."""

from __future__ import annotations

from pathlib import Path

from megarlhf.data.tokenizer import HuggingFaceTokenizer, load_tokenizer
from tests.classifiers import write_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %}{{ m.content }}{{ eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)
"""Asks with `<think>`, which is not in the conversation afterwards: prefixes cannot tell what is the answer's."""
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Leaves out of earlier answers what was thought."""
TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}{{ c.function.arguments | tojson }}</call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STYLES = {
    "chatml": CHATML,
    "llama_3": LLAMA_3,
    "mistral": MISTRAL,
    "marked": MARKED,
    "thinking": THINKING,
    "tools": TOOLS,
}
MARKS = ("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
LETTERS = "0123456789+=abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ[]<>|/_:,.!?{}\"' \n"


def write_chat_tokenizer(directory: Path, template: str | None) -> Path:
    """With bos `<s>`, eos `</s>` and the marks of all styles, of one id each."""
    special = ("<unk>", "<s>", "</s>", "<pad>", *MARKS)
    return write_tokenizer(
        directory, special=special, letters=LETTERS, chat_template=template, additional_special_tokens=list(MARKS)
    )


def chat_tokenizer(directory: Path, template: str | None) -> HuggingFaceTokenizer:
    """Loaded."""
    tokenizer = load_tokenizer(write_chat_tokenizer(directory, template))
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    return tokenizer


def said(role: str, content: str, **others: object) -> dict[str, object]:
    """A message."""
    return {"role": role, "content": content, **others}
