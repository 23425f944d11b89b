"""Chat templates in the style of well-known models, on which turns and what stands between them can go wrong."""

from tests.data.chat_styles import CHATML, STYLES

ASKING = "{% if add_generation_prompt %}<|im_start|>assistant\n"
LEAD = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
"""As Mistral's first: a space before answers, and nothing of tools."""
NO_ENDS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
NEXT_BEGINS = CHATML.replace("<|im_end|>\n", "")
"""As GLM's: the next message's mark ends an answer."""
EARLIER_ENDS = CHATML.replace(
    "<|im_end|>", "{{ '<|eot_id|>' if loop.last and m.role == 'assistant' else '<|im_end|>' }}"
)
"""As that of gpt-oss: the last answer ends with another token."""
OPENED = CHATML.replace(ASKING, ASKING + "<think>\n")
BRACKETED = CHATML.replace(ASKING, ASKING + "[THINK]")
EMPTIED = OPENED.replace(
    "{{ m.content }}",
    "{{ '<think></think>' if m.role == 'assistant' and '<think>' not in m.content }}{{ m.content }}",
)
"""As Nemotron's: an answer without a thought gets an empty one."""
SWITCHED = STYLES["stripping"].replace(ASKING, ASKING + "{% if not thinking %}<think>\n\n</think>\n\n{% endif %}")
"""As Qwen3's `enable_thinking: false`: asks with an empty thought that the history does not have."""
LATE_ENDS = CHATML.replace("{{ m.content }}", "{{ m.content }}</turn>")
TWICE = CHATML.replace("{{ m.content }}", "{{ m.content }}{% if m.role == 'assistant' %}<|eot_id|></s>{% endif %}")
"""Three tokens end a turn."""
HOISTING = (
    "{% for m in messages if m.role == 'tool' %}[tool]{{ m.content }}{% endfor %}"
    "{% for m in messages if m.role != 'tool' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
JSON = CHATML.replace("{{ m.content }}", "{{ m.content | tojson if m.role == 'tool' else m.content }}")
SPLITTING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and '</think>' in m.content %}"
    "{% set parts = m.content.split('</think>') %}<think>\n{{ parts[0].split('<think>')[-1].strip('\n') }}\n</think>"
    "\n\n{{ parts[-1].lstrip('\n') }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
"""As Qwen3's for thinking alone: asks with `<think>`, and keeps thoughts."""
REFUSING = CHATML.replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' and '[final]' in m.content %}{{ raise_exception('a mark in a content') }}{% endif %}"
    "{{ '[final]' if m.role == 'assistant' }}{{ m.content }}",
)
"""As that of gpt-oss: writes a mark that the model samples, and refuses it in a message."""
TURN_STYLES = {
    "lead": LEAD, "no_ends": NO_ENDS, "next_begins": NEXT_BEGINS, "earlier_ends": EARLIER_ENDS, "opened": OPENED,
    "bracketed": BRACKETED, "emptied": EMPTIED, "switched": SWITCHED, "late_ends": LATE_ENDS, "twice": TWICE,
    "hoisting": HOISTING, "json": JSON, "refusing": REFUSING,
    "splitting": SPLITTING,
}  # fmt: skip
