"""Work of each rollout engine: the samples that the real rule deals to it, and the tokens that it computes for them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megarlhf.config.rollout import Balance
from megarlhf.rehearsal.cost_model.decoding import RolloutWork, Sequences, StretchLengths
from megarlhf.rollout.balance import EngineAssignment, SeenLengths, assign, chunk_by_length, prompt_of
from megarlhf.rollout.responses import ResponsePart


def deal(
    prompts: Sequence[Tensor],
    parts: Sequence[ResponsePart],
    drawn: Sequence[StretchLengths],
    balance: Balance,
    num_engines: int,
    seen: SeenLengths,
) -> tuple[RolloutWork, EngineAssignment]:
    """Work of all engines, and the rows with which each begins.

    prompts: rows that end with the earlier parts of their responses
    drawn:   stretches of each row that are drawn now
    """
    chunks = chunk_by_length(prompts, parts, range(len(prompts)), num_engines, seen)
    assignment = assign(balance, chunks, num_engines)

    def sequences(rows: Sequence[int]) -> Sequences:
        computed = tokens_to_compute([prompts[n] for n in rows], [parts[n] for n in rows])
        return Sequences.of_stretches([len(prompts[n]) for n in rows], [drawn[n] for n in rows], computed)

    first, queue = map(sequences, assignment.first), map(sequences, assignment.queue)
    return RolloutWork([*first], [*queue], assignment.max_unfinished), assignment


def tokens_to_compute(prompts: Sequence[Tensor], parts: Sequence[ResponsePart]) -> list[int]:
    """Tokens of each row that an engine computes before it draws: what was drawn earlier, and the prompt itself at its
    first row."""
    seen, computed = set[bytes](), []
    for row, part in zip(prompts, parts, strict=True):
        prompt = prompt_of(row, part).numpy().tobytes()
        computed.append(len(part.so_far) if prompt in seen else len(row))
        seen.add(prompt)
    return computed
