"""Responses of given lengths from vLLM, which does not know them beforehand."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock


@contextlib.contextmanager
def planted(lengths: Sequence[int]) -> Iterator[None]:
    """Scope in which the response of row n ends when it has lengths[n] tokens, earlier parts included."""
    from megarlhf.rollout.engine import ResponsePart, Sampling
    from megarlhf.rollout.vllm import build, generate_loop
    from megarlhf.rollout.vllm import engine as vllm_engine

    rows: dict[str, int] = {}

    def enqueue(
        llm: Any, prompts: Any, seeds: Any, sampling: Sampling, parts: Any, asked: Sequence[int], **options: Any
    ) -> list[str]:
        limited = [
            dataclasses.replace(part, until=min(part.until, length))
            for part, length in zip(parts, lengths, strict=True)
        ]
        names = build.enqueue(llm, prompts, seeds, sampling, limited, asked, **options)
        rows.update((name.split("-")[0], row) for name, row in zip(names, asked, strict=True))
        return names

    def response_of(output: Any, sampling: Sampling, version: int, part: ResponsePart) -> Any:
        drawn = len(part.so_far) + len(output.outputs[0].token_ids)
        ends = drawn == lengths[rows[output.request_id]] < sampling.max_tokens
        return generate_loop.response_so_far(output, version, finished=ends)

    with (
        mock.patch.object(vllm_engine, "enqueue", enqueue),
        mock.patch.object(generate_loop, "response_of", response_of),
    ):
        yield
