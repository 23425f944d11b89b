"""Lines of the rollout bank's files: a response or an answered turn as a JSON object with its digest."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from megarlhf.rollout.responses import AnsweredTurn, Response
from megarlhf.rollouts import Dialogue

Record = Mapping[str, Any]


def digest_of_bytes(content: bytes) -> str:
    """Digest as a text."""
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _encode(values: np.ndarray) -> str:
    return base64.b64encode(values.tobytes()).decode()


def _decode(text: str, dtype: str) -> list[Any]:
    return list(np.frombuffer(base64.b64decode(text, validate=True), dtype=dtype).tolist())


def _text(record: Record) -> str:
    return json.dumps(record, sort_keys=True)


def line_of(record: Record) -> bytes:
    """Line of a record, with its digest."""
    return (json.dumps({"digest": digest_of_bytes(_text(record).encode()), "record": record}) + "\n").encode()


def record_in(line: bytes) -> Record | None:
    """Record of a line; None if the line is incomplete or corrupt."""
    try:
        content = json.loads(line)
        record, digest = content["record"], content["digest"]
    except (ValueError, KeyError, TypeError):
        return None
    return record if isinstance(record, dict) and digest == digest_of_bytes(_text(record).encode()) else None


def record_of_response(response: Response) -> dict[str, Any]:
    """Content of a response's record. `response_of_record` is the inverse."""
    record = {
        "finished": response.finished,
        "tokens": _encode(np.array(response.tokens, dtype="<i4")),
        "logprobs": _encode(np.array(response.logprobs, dtype="<f4")),
        "versions": response.versions,
    }
    if response.dialogue is None:
        return record
    return {
        **record,
        "stretches": response.stretches,
        "observed": _encode(np.array(response.observed, dtype="<i4")),
        "dialogue": response.dialogue.to_json(),
    }


def record_of_turn(turn: AnsweredTurn) -> dict[str, Any]:
    """Content of an answered turn's record. `turn_of_record` is the inverse."""
    return {
        **turn._asdict(),
        "tokens": _encode(np.array(turn.tokens, dtype="<i4")),
        "logprobs": _encode(np.array(turn.logprobs, dtype="<f4")),
        "observed": _encode(np.array(turn.observed, dtype="<i4")),
    }


def response_of_record(record: Record, step: int) -> Response:
    """Response of a record. `step`: version of the weights, where the record has none"""
    tokens = _decode(record["tokens"], "<i4")
    versions = tuple((version, count) for version, count in record.get("versions", [[step, len(tokens)]]))
    response = Response(tokens, _decode(record["logprobs"], "<f4"), record["finished"], versions)
    if "dialogue" not in record:
        return response
    stretches, observed = tuple(record["stretches"]), _decode(record["observed"], "<i4")
    return dataclasses.replace(
        response, stretches=stretches, observed=observed, dialogue=Dialogue.from_json(record["dialogue"])
    )


def turn_of_record(record: Record) -> AnsweredTurn:
    """Answered turn of a record."""
    plain = {name: record[name] for name in ("version", "answer", "history", "before")}
    observed = _decode(record["observed"], "<i4")
    tokens, logprobs = _decode(record["tokens"], "<i4"), _decode(record["logprobs"], "<f4")
    return AnsweredTurn(tokens=tokens, logprobs=logprobs, observed=observed, **plain)
