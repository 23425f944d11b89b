"""Client of a reward model behind a URL, with the protocol of OpenRLHF's server.

Request, by POST as JSON: {"query": [prompt and response], "prompts": [...], "labels": [answers or null]}. We add
"columns": [all other columns of each record] and, if prompts were conversations, "messages";
with an environment also "turns" [texts of the model's turns]. Then prompts and messages have all before the last one.
Answer: {"rewards": [a number or null for each]}, or "scores" in place of "rewards". Null means that the reward does not
apply, unless the answer has {"failed": {"NUMBER": "why"}} for it, as `serve-reward` writes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from megarlhf.own_code.failures import short
from megarlhf.rollout.rewards.batch import RewardBatch, RewardResult
from megarlhf.rollout.rewards.forms import label_of
from megarlhf.rollout.rewards.pool import BACKOFF_SECONDS, Pending
from megarlhf.rollout.workers.process import POLL_SECONDS

BATCH_SAMPLES = 32
"""Responses in one request by default."""
OPENS_AFTER = 5
"""Failed requests in a row, each with all its tries, after which no more are sent for a while."""
OPEN_SECONDS = 30.0
MAX_ANSWER_BYTES = 64 * 2**20
RETRIED_STATUSES = (408, 425, 429)
"""Statuses below 500 after which a retry may succeed."""


class ServerError(RuntimeError):
    """No usable answer from the server. The message says why."""


class Refused(ServerError):
    """The server rejects the request, such as for a wrong token. A retry would not help."""


class Circuit:
    """Circuit breaker: pauses requests to a server that fails, so that a step does not wait for all their retries."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._failures, self._until, self._reason = 0, -math.inf, ""

    def reason(self) -> str:
        """Why no request is sent now; empty: requests are sent.

        After `OPEN_SECONDS` a single request probes the server. The others wait as long again for its outcome.
        """
        with self._lock:
            if self._failures < OPENS_AFTER:
                return ""
            if self._clock() >= self._until:
                self._until = self._clock() + OPEN_SECONDS
                return ""
            return (
                f"not sent: the last {self._failures} requests failed, and none is sent for {OPEN_SECONDS:g} s; the "
                f"last one: {self._reason}"
            )

    def note(self, error: str) -> None:
        """Record how a request ended; an empty error is a success."""
        with self._lock:
            self._failures = self._failures + 1 if error else 0
            self._reason, self._until = error, self._clock() + OPEN_SECONDS


class HttpReward:
    """Client of one server on this rank. Threads wait for the answers."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout_seconds: float = 60.0,
        retries: int = 4,
        workers: int = 1,
        batch_samples: int | None = None,
        backoff_seconds: Sequence[float] = BACKOFF_SECONDS,
    ) -> None:
        logging.getLogger("httpx").setLevel(logging.WARNING)  # at INFO it writes a line for each request
        self._url, self._retries, self._backoff = url, retries, backoff_seconds
        self._batch_samples, self._timeout = batch_samples or BATCH_SAMPLES, timeout_seconds
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._verify = httpx.create_ssl_context()
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="reward")
        self._circuit, self._closed = Circuit(), threading.Event()

    def start(self, batch: RewardBatch) -> Pending:
        """Begin to reward a batch, without waiting."""
        pending = Pending(len(batch))
        for rows in batch.row_ranges(self._batch_samples):
            self._threads.submit(self._answer, rows, batch.part(rows), pending)
        return pending

    def close(self) -> None:
        """End the threads. Open requests are abandoned."""
        self._closed.set()
        self._threads.shutdown(cancel_futures=True)

    def _answer(self, rows: Sequence[int], batch: RewardBatch, pending: Pending) -> None:
        begun = time.monotonic()
        try:
            results = self._with_retries(batch)
        except BaseException as error:  # noqa: BLE001 - the rank would wait for a thread that died silently
            results = [RewardResult(error=f"{type(error).__name__}: {error}")] * len(batch)
        pending.put(rows, results, time.monotonic() - begun)

    def _with_retries(self, batch: RewardBatch) -> list[RewardResult]:
        if refused := self._circuit.reason():
            return [RewardResult(error=refused, late=True)] * len(batch)
        error = ""
        for attempt in range(self._retries + 1):
            if attempt and self._closed.wait(self._backoff[min(attempt, len(self._backoff)) - 1]):
                break
            try:
                results = self._ask(batch)
            except Refused as failure:
                self._circuit.note(str(failure))
                return [RewardResult(error=str(failure))] * len(batch)
            except ServerError as failure:
                error = str(failure)
                continue
            self._circuit.note("")
            return results
        self._circuit.note(error)
        return [RewardResult(error=f"{error} (tried {self._retries + 1} times)", late=True)] * len(batch)

    def _ask(self, batch: RewardBatch) -> list[RewardResult]:
        """Raises: Refused, and ServerError if a retry may help."""
        queries = [prompt + response for prompt, response in zip(batch.prompts, batch.responses, strict=True)]
        columns = [_plain(fields) for fields in batch.fields]
        labels = [label_of(fields) for fields in columns]
        body = {"query": queries, "prompts": list(batch.prompts), "labels": labels, "columns": columns}
        if any(messages is not None for messages in batch.messages):
            body["messages"] = [_plain(messages) for messages in batch.messages]
        if batch.turns is not None:
            body["turns"] = [list(turns) for turns in batch.turns]
        try:
            status, content = asyncio.run(self._post(body))
        except ServerError:
            raise
        except TimeoutError as error:
            raise ServerError(f"{self._url} did not answer in time ({self._timeout:g} s)") from error
        except (httpx.HTTPError, httpx.InvalidURL, OSError, RuntimeError) as error:
            raise ServerError(f"{self._url} cannot be reached: {type(error).__name__}: {error}") from error
        if status != 200:
            kind = Refused if 400 <= status < 500 and status not in RETRIED_STATUSES else ServerError
            raise kind(f"{self._url} answered with status {status}: {short(_text(content))}")
        return self._results(content, batch)

    async def _post(self, body: Any) -> tuple[int, bytes]:
        """Status and content, within `timeout_seconds` as a whole: httpx's own limit is between two bytes.

        Raises: TimeoutError, ServerError, and errors of httpx.
        """
        request = asyncio.ensure_future(asyncio.wait_for(self._send(body), self._timeout))
        while not request.done() and not self._closed.is_set():
            await asyncio.wait({request}, timeout=POLL_SECONDS)
        if not request.done():
            request.cancel()
            raise ServerError(f"{self._url}: the run has ended")
        return request.result()

    async def _send(self, body: Any) -> tuple[int, bytes]:
        content = bytearray()
        async with (
            httpx.AsyncClient(timeout=self._timeout, headers=self._headers, verify=self._verify) as client,
            client.stream("POST", self._url, json=body) as response,
        ):
            async for chunk in response.aiter_bytes():
                content += chunk
                if len(content) > MAX_ANSWER_BYTES:
                    raise ServerError(f"{self._url} answers with more than {MAX_ANSWER_BYTES} bytes")
        return response.status_code, bytes(content)

    def _results(self, content: bytes, batch: RewardBatch) -> list[RewardResult]:
        try:
            tree: Any = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ServerError(f"{self._url} answered with no JSON: {short(_text(content))}") from error
        answer: Mapping[str, Any] = tree if isinstance(tree, dict) else {}
        values = answer.get("rewards", answer.get("scores"))
        if not isinstance(values, list):
            raise ServerError(f'{self._url} answered {short(tree)}, expected {{"rewards": [...]}}')
        if len(values) != len(batch):
            raise ServerError(f"{self._url} answered with {len(values)} rewards for {len(batch)} responses")
        failed = answer.get("failed")
        reasons = failed if isinstance(failed, dict) else {}
        results = []
        for n, value in enumerate(values):
            if value is None and str(n) in reasons:
                results.append(RewardResult(error=f"{self._url} says: {short(reasons[str(n)])}"))
                continue
            try:
                results.append(RewardResult.of(value, None))
            except ValueError as error:
                results.append(RewardResult(error=f"{self._url} {error}"))
        return results


def require_plain_token(variable: str | None, token: str | None) -> None:
    """Raises: ValueError for a token that no HTTP header can hold. The message does not show the token."""
    if token is not None and not (token.isascii() and token.isprintable() and token == token.strip()):
        raise ValueError(
            f"the environment variable {variable} holds white space at an end, or what no HTTP header may have; export "
            "the token alone, without the end of a line"
        )


def _plain(value: Any) -> Any:
    """Convert a value for JSON: NaN and infinity become null, unknown types become text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _text(content: bytes) -> str:
    return content.decode("utf-8", "replace")
