"""Chat templates in the style of well-known models, and a tokenizer of one id a character for them."""

from __future__ import annotations

from pathlib import Path

from megarlhf.data.tokenizers.tokenizer import HuggingFaceTokenizer, load_tokenizer
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
TWO_ROLES = (
    "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As the first one of Phi-3: what others say is left out."""
REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRIPPING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1].lstrip('\n') if m.role == 'assistant' else m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As those of R1's distillations: an answer is written without its thought, also the last one."""
QWEN_3 = (
    "{% set last = namespace(user=0) %}{% for m in messages if m.role == 'user' %}"
    "{% set last.user = messages.index(m) %}{% endfor %}{% for m in messages %}"
    "{% if m.role in ['user', 'system'] %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n{% elif m.role == 'assistant' %}{% set content = m.content %}"
    "{% set thought = m.reasoning_content or '' %}{% if '</think>' in content and not thought %}"
    "{% set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}<|im_start|>assistant\n"
    "{% if loop.index0 > last.user and thought %}<think>\n{{ thought.strip('\n') }}\n</think>\n\n"
    "{{ content.lstrip('\n') }}{% else %}{{ content }}{% endif %}"
    '{% for c in m.tool_calls or [] %}\n<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Splits thoughts off, writes them anew, and only behind the last question."""
DEEPSEEK = (
    "{% set all = namespace(system='') %}{% for m in messages if m.role == 'system' %}"
    "{% set all.system = all.system + m.content %}{% endfor %}{{ bos_token }}{{ all.system }}{% for m in messages %}"
    "{% if m.role == 'user' %}[user]{{ m.content }}{% elif m.role == 'tool' %}[tool]{{ m.content }}"
    "{% elif m.role == 'assistant' and m.content is none %}[assistant]{% for c in m.tool_calls %}"
    "{{ '[call]' + c.function.name + '\n' + c.function.arguments + '[/call]' }}{% endfor %}{{ eos_token }}"
    "{% elif m.role == 'assistant' %}[assistant]{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""Writes calls of tools only where there is no content, and their arguments as the JSON that they are given as."""
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ first if loop.first else '' }}"
    "{{ m.content | trim }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)
STYLES = {
    "chatml": CHATML, "llama_3": LLAMA_3, "mistral": MISTRAL, "marked": MARKED, "thinking": THINKING, "tools": TOOLS,
    "two_roles": TWO_ROLES, "reasoning": REASONING, "stripping": STRIPPING, "qwen_3": QWEN_3, "deepseek": DEEPSEEK,
    "gemma": GEMMA,
}  # fmt: skip
MARKS = ("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
LETTERS = "0123456789+=abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ[]<>|/_:,.!?{}\"' \n\\-#"


def write_chat_tokenizer(directory: Path, template: str | None) -> Path:
    """With bos `<s>`, eos `</s>` and the marks of all styles, of one id each."""
    special = ("<unk>", "<s>", "</s>", "<pad>", *MARKS)
    return write_tokenizer(
        directory, special=special, letters=LETTERS, chat_template=template, additional_special_tokens=list(MARKS)
    )


def chat_tokenizer(directory: Path, template: str | None) -> HuggingFaceTokenizer:
    tokenizer = load_tokenizer(write_chat_tokenizer(directory, template))
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    return tokenizer


def said(role: str, content: str, **others: object) -> dict[str, object]:
    return {"role": role, "content": content, **others}
