"""Server of rewards for `kind: http`, with the protocol of OpenRLHF's server.

POST /get_reward takes {"query": [...], "prompts": [...], "labels": [...]}, and optionally "columns": [other columns of
each record], "messages": [a conversation or null for each] and "turns": [texts or null for each]. It answers
{"rewards": [number or null, ...], "failed": {"NUMBER": "why", ...}}; `failed` names the responses whose reward is null
because it failed and is dropped.
GET /health lists the rewards. Requests are served one after the other.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import math
from collections.abc import Mapping
from typing import Any

from megarlhf.config import RewardConfig
from megarlhf.own_code.failures import short
from megarlhf.rollout.rewards.batch import MissingColumn, RewardBatch, RewardResult
from megarlhf.rollout.rewards.score import RewardSource

log = logging.getLogger(__name__)

Sources = Mapping[str, tuple[RewardConfig, RewardSource]]
"""Configuration and source of each reward, by label."""


class RequestError(ValueError):
    """A request that cannot be answered, with its HTTP status."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


def make_app(sources: Sources, *, token: str | None, max_samples: int, max_bytes: int) -> Any:
    """Make the ASGI application."""
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    one_at_a_time = asyncio.Lock()

    async def get_reward(request: Request) -> JSONResponse:
        try:
            require_token(request.headers.get("authorization"), token)
            body = bytearray()
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise RequestError(413, f"the request is larger than {max_bytes} bytes, which max_body_mib allows")
            batch = batch_of(bytes(body), max_samples)
            async with one_at_a_time:
                answer = await run_in_threadpool(answer_to, batch, sources)
        except RequestError as error:
            return JSONResponse({"detail": str(error)}, status_code=error.status)
        return JSONResponse(answer)

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok", "rewards": list(sources)})

    return Starlette(
        routes=[Route("/get_reward", get_reward, methods=["POST"]), Route("/health", health, methods=["GET"])]
    )


def require_token(header: str | None, token: str | None) -> None:
    """Raises: RequestError for a wrong token. The comparison takes constant time."""
    if token is not None and not hmac.compare_digest((header or "").encode(), f"Bearer {token}".encode()):
        raise RequestError(401, "Authorization: Bearer TOKEN is missing, or has another token")


def batch_of(body: bytes, max_samples: int) -> RewardBatch:
    """Read a request. Without `prompts` a whole query is the response. Raises: RequestError."""
    try:
        tree = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(422, f"the request is no JSON: {error}") from None
    if not isinstance(tree, dict):
        raise RequestError(422, f'got {short(tree)}, expected {{"query": [...], "prompts": [...], "labels": [...]}}')
    queries = _texts(tree, "query")
    count = len(queries)
    if count > max_samples:
        raise RequestError(413, f"got {count} responses, at most {max_samples}: send several requests (batch_samples)")
    prompts = _texts(tree, "prompts") if tree.get("prompts") is not None else [""] * count
    labels = tree.get("labels") if tree.get("labels") is not None else [None] * count
    if not isinstance(labels, list) or not len(prompts) == len(labels) == count:
        raise RequestError(422, f"query has {count} entries; prompts and labels must be lists of as many")
    columns, messages = _entries(tree, "columns", count, dict), _entries(tree, "messages", count, list)
    if wrong := [n for n in range(count) if not queries[n].startswith(prompts[n])]:
        raise RequestError(422, f"query {wrong[0]} does not begin with its prompt: {short(queries[wrong[0]])}")
    return RewardBatch(
        prompts=prompts,
        responses=[query[len(prompt) :] for query, prompt in zip(queries, prompts, strict=True)],
        prompt_tokens=MissingColumn("prompt_tokens"),
        response_tokens=MissingColumn("response_tokens"),
        finished=MissingColumn("finished"),
        fields=[
            ({} if label is None else {"answer": label}) | (row or {})
            for label, row in zip(labels, columns or [None] * count, strict=True)
        ],
        messages=messages or MissingColumn("messages"),
        samples=list(range(count)),
        turns=_entries(tree, "turns", count, list),
    )


def _entries(tree: Mapping[str, Any], key: str, count: int, kind: type) -> list[Any] | None:
    """Entries of an optional key, each of the given kind or null; None without the key. Raises: RequestError."""
    values = tree.get(key)
    if values is None:
        return None
    if not isinstance(values, list) or len(values) != count:
        raise RequestError(422, f"query has {count} entries; {key} must be a list of as many")
    if not all(value is None or isinstance(value, kind) for value in values):
        raise RequestError(422, f"{key} = {short(values)}, expected {'objects' if kind is dict else 'lists'} or null")
    return values


def _texts(tree: Mapping[str, Any], key: str) -> list[str]:
    values = tree.get(key)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise RequestError(422, f"{key} = {short(values)}, expected a list of texts")
    return values


def answer_to(batch: RewardBatch, sources: Sources) -> dict[str, Any]:
    """Answer a request: `rewards`, the weighted sum for each response, or null if no reward applies or one has failed;
    `by_reward`, the values of each reward; `failed`, the error by number of each response that failed.

    Raises: RequestError for a reward that failed, unless its `on_failure` is `drop`.
    """
    pending = {label: source.start(batch) for label, (_, source) in sources.items()}
    total: list[float | None] = [None] * len(batch)
    by_reward: dict[str, list[float | None]] = {}
    failed: dict[str, str] = {}
    for label, (reward, _) in sources.items():
        results = pending[label].wait() or []
        by_reward[label] = [_value(label, reward, result, n) for n, result in enumerate(results)]
        failed |= {str(n): f"reward {label!r} {result.error}" for n, result in enumerate(results) if result.error}
        for n, value in enumerate(by_reward[label]):
            if value is not None:
                clipped = value - reward.shift
                clipped = clipped if reward.clip is None else max(-reward.clip, min(reward.clip, clipped))
                total[n] = (total[n] or 0.0) + reward.weight * clipped
    rewards = [None if str(n) in failed else value for n, value in enumerate(total)]
    return {"rewards": rewards, "by_reward": by_reward, "failed": failed}


def _value(label: str, reward: RewardConfig, result: RewardResult, n: int) -> float | None:
    if result.error:
        log.warning("reward %r failed on response %d of a request: %s", label, n, result.error)
        if reward.on_failure == "stop":
            raise RequestError(500, f"reward {label!r} on response {n} {result.error}")
        return None
    value = result.value
    return value if value is not None and math.isfinite(value) else None
