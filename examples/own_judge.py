"""An own reward: a judge model behind HTTP grades each response from 0 to 10.

The judge is any server with OpenAI's chat completions, such as `vllm serve Qwen/Qwen2.5-7B-Instruct`. Sixteen requests
of each rank run at the same time, and a failed one leaves its sample out of the step. After `make demo`:

    export JUDGE_URL=http://localhost:8000/v1/chat/completions JUDGE_MODEL=Qwen/Qwen2.5-7B-Instruct
    PYTHONPATH=examples megarlhf rl -c configs/demo/grpo.yaml run.dir=runs/judge \
        run.on_existing=resume checkpoint.every=1 \
        "rewards=[{kind: rule, rule: 'own_judge:grade', on_failure: drop, timeout_seconds: 120}]"
"""

import os
import re
from collections.abc import Mapping
from typing import Any

import httpx

QUESTION = """Grade the answer from 0 (useless) to 10 (perfect). Reply with the number only.

Question: {prompt}
Right answer, if known: {answer}
Answer to grade: {response}"""

client = httpx.AsyncClient(timeout=100.0)
url, model = os.environ["JUDGE_URL"], os.environ["JUDGE_MODEL"]  # missing ones end the start, not the first step


async def grade(prompt: str, response: str, fields: Mapping[str, Any]) -> float:
    """The judge's grade, from 0 to 1. An answer without a number is an error, and the sample is left out."""
    text = QUESTION.format(prompt=prompt, answer=fields.get("answer", "unknown"), response=response)
    body = {"model": model, "messages": [{"role": "user", "content": text}], "temperature": 0.0}
    answer = await client.post(url, json=body)
    answer.raise_for_status()
    said = answer.json()["choices"][0]["message"]["content"]
    number = re.search(r"\d+(\.\d+)?", said)
    if number is None:
        raise ValueError(f"the judge replied {said!r}, without a number")
    return min(float(number[0]), 10.0) / 10
