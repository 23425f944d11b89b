"""Responses of an engine: the sampled tokens of each sample, what stands between them, and the weights that drew them.

Legend: N samples of the step, T tokens of the samples end to end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import zip_longest
from typing import Any, Literal

import torch
from torch import Tensor

from megarlhf.columns import Ragged


@dataclass(frozen=True)
class VersionRuns:
    """Versions of the weights that drew each sampled token, as runs over the sampled tokens of each sample.

    Example: a sample of 5 tokens, 2 drawn by version 3 and then 3 by version 4: its row of `versions` is [3, 4], its
    row of `lengths` [2, 3].
    """

    versions: Ragged
    """int64, on the CPU."""
    lengths: Ragged
    """Sampled tokens of each run, int64, on the CPU."""

    @staticmethod
    def constant(version: int, lengths_N: Tensor) -> VersionRuns:
        """One run for each sample."""
        ones_N = torch.ones_like(lengths_N)
        return VersionRuns(Ragged(torch.full_like(lengths_N, version), ones_N), Ragged(lengths_N.clone(), ones_N))

    @staticmethod
    def from_rows(rows: Sequence[Sequence[tuple[int, int]]]) -> VersionRuns:
        """Runs (version, number of tokens) of each sample."""
        counts_N = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        versions, lengths = (torch.tensor([run[n] for row in rows for run in row], dtype=torch.int64) for n in (0, 1))
        return VersionRuns(Ragged(versions, counts_N), Ragged(lengths, counts_N))

    @staticmethod
    def joined(parts: Sequence[tuple[VersionRuns, Sequence[int]]]) -> VersionRuns:
        """Runs of chosen samples, one part after the other."""
        return VersionRuns(
            Ragged.joined([(runs.versions, chosen) for runs, chosen in parts]),
            Ragged.joined([(runs.lengths, chosen) for runs, chosen in parts]),
        )

    def extended(self, rows: Sequence[int], more: VersionRuns) -> VersionRuns:
        """Runs of which those of the samples `rows` go on."""
        return VersionRuns(self.versions.extended(rows, more.versions), self.lengths.extended(rows, more.lengths))

    def per_token(self) -> Ragged:
        """Version of each sampled token."""
        return Ragged(self.versions.values_T.repeat_interleave(self.lengths.values_T), self.lengths.sums_N)

    def require(self, version: int) -> None:
        """Raises: RuntimeError where a token was drawn by another version than the configuration promises."""
        self.require_runs(VersionRuns.constant(version, self.lengths.sums_N))

    def require_runs(self, expected: VersionRuns) -> None:
        """Raises: RuntimeError where a token was drawn by another version than is expected."""
        drawn_T, expected_T = self.per_token().values_T, expected.per_token().values_T
        if bool((differ_T := drawn_T != expected_T).any()):
            wrong = torch.stack([drawn_T[differ_T], expected_T[differ_T]], 1).unique(dim=0)[:5].tolist()
            pairs = ", ".join(f"version {drawn}, expected version {right}" for drawn, right in wrong)
            raise RuntimeError(
                f"samples of this step were drawn with other weights than the configuration says ({pairs}): the "
                "rollout engine has missed an update. If they are in the rollout bank, remove the folder `bank` of the "
                "run before it is resumed"
            )


@dataclass(frozen=True)
class Stretches:
    """Tokens after the prompts, where the model and something else, such as a tool, write in turn.

    The first and the last stretch after a prompt are sampled by the model. Between two sampled stretches is an observed
    one, such as the answer of a tool. Example: the model wrote "a b", the tool answered "c d e", and the model wrote
    "f". Then the row of `lengths` is [2, 3, 1], the row of `observed` is "c d e", and the sample's row in
    `Rollouts.responses`, which has only sampled tokens, is "a b f".
    """

    lengths: Ragged
    """Number of tokens of each stretch, for an odd number of stretches per sample: int64, on the CPU."""
    observed: Ragged
    """Tokens that were not sampled, int64."""

    @staticmethod
    def joined(parts: Sequence[tuple[Stretches, Sequence[int]]]) -> Stretches:
        """Stretches of chosen samples, one part after the other."""
        return Stretches(
            Ragged.joined([(stretches.lengths, chosen) for stretches, chosen in parts]),
            Ragged.joined([(stretches.observed, chosen) for stretches, chosen in parts]),
        )

    @property
    def sampled(self) -> Ragged:
        """Number of tokens of each sampled stretch."""
        return Ragged.from_rows([row[::2] for row in self.lengths.rows()], torch.int64)

    def written(self, sampled: Ragged) -> Ragged:
        """All tokens after each prompt: sampled and observed stretches in turn."""
        rows = [
            torch.cat([part for pair in zip_longest(own[::2], own[1::2]) for part in pair if part is not None])
            for own in map(self._in_turn, self.lengths.rows(), sampled.rows(), self.observed.rows())
        ]
        return Ragged.from_rows(rows, sampled.values_T.dtype)

    @property
    def positions_T(self) -> Tensor:
        """Position of each sampled token after its prompt, int64 on the CPU, sample after sample."""
        starts = [row.cumsum(0) - row for row in self.lengths.rows()]
        first_P, counts_P = torch.cat([row[::2] for row in starts]), self.sampled.values_T
        within_T = torch.arange(int(counts_P.sum())) - (counts_P.cumsum(0) - counts_P).repeat_interleave(counts_P)
        return first_P.repeat_interleave(counts_P) + within_T

    @staticmethod
    def _in_turn(lengths: Tensor, sampled: Tensor, observed: Tensor) -> list[Tensor]:
        """Stretches of one sample, in their order."""
        stretches: list[Tensor] = [sampled] * len(lengths)
        stretches[::2] = sampled.split(lengths[::2].tolist())
        if len(lengths) > 1:
            stretches[1::2] = observed.to(sampled).split(lengths[1::2].tolist())
        return stretches


EndedBy = Literal["", "environment", "model", "turn_cut", "no_room", "max_turns", "failure"]
"""Reason for the end of a conversation. Empty: it goes on. `environment`: it said so. `model`: the model ended its
turn, and the environment had nothing to say. The others are limits: `turn_cut`: a turn reached its limit of tokens;
`no_room`: no token is left for a further turn; `max_turns`. `failure`: the environment failed."""
REASONS: tuple[EndedBy, ...] = ("environment", "model", "turn_cut", "no_room", "max_turns", "failure")
"""Reasons for which a conversation ends."""
OVER = ("environment", "model")
"""Reasons that are no limit. A conversation that ended for another one is truncated."""


@dataclass(frozen=True)
class Dialogue:
    """The environment's part of one conversation, and how the conversation ended.

    Example: the model wrote "5", the environment answered "higher", the model wrote "7", which ended it. Then
    `observations` are [nothing at the beginning, "higher"], and `rewards` those of the two turns.
    """

    opening: tuple[int, ...] = ()
    """Tokens of the prompt with messages that the environment added before the first turn; empty: it added none."""
    added: int = 0
    """Tokens by which the opening is longer than the prompt. They count as written after it."""
    observations: tuple[Any, ...] = ()
    """Messages, or texts: those of the opening, then one entry for each answer that the model has read."""
    rewards: tuple[float | None, ...] = ()
    """Reward of each turn that was answered; None: none."""
    ended_by: EndedBy = ""
    error: str = ""
    """Message about the environment's failure, if that ended the conversation."""
    begun: int = 0
    """Version of the weights that began the conversation, if it had to begin anew; else 0."""
    rewritten: int = 0
    """Turns that the chat template would have written otherwise once an answer follows."""
    white_space: int = 0
    """Turns of which it would have written other white space."""
    redraws: int = 0
    """Times that the conversation began anew, because its environment failed or answered otherwise."""

    @property
    def is_over(self) -> bool:
        return bool(self.ended_by)

    def to_json(self) -> dict[str, Any]:
        """The dialogue as JSON values, without what is as by default; `from_json` is the inverse."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) != field.default}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Dialogue:
        plain: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
        }
        return cls(**plain)


@dataclass(frozen=True)
class Rollouts:
    """Responses of an engine, the same on every rank."""

    responses: Ragged
    """Sampled tokens of each sample, int64, including its end token if it has one."""
    logprobs: Ragged
    """The engine's log-probs of the sampled tokens, under the distribution that it sampled from."""
    finished_N: Tensor
    """bool: ended by an end token, not by the token limit. A conversation: ended by no limit."""
    versions: VersionRuns
    """Weights that drew the sampled tokens."""
    stretches: Stretches | None = None
    """Positions of the sampled tokens after the prompt; None: each sample is one sampled stretch."""
    dialogues: tuple[Dialogue, ...] = ()
    """Conversation of each sample with an environment; empty: there is no environment."""
    idle_seconds: float = 0.0
    """Seconds that an engine waited for the slowest one, the mean over engines; 0 for joined rollouts."""

    def __post_init__(self) -> None:
        lengths = {"log-probs": self.logprobs.lengths_N, "versions": self.versions.lengths.sums_N}
        if self.stretches is not None:
            lengths["sampled stretches"] = self.stretches.sampled.sums_N
        for name, lengths_N in lengths.items():
            assert torch.equal(lengths_N, self.responses.lengths_N), f"{name} of other lengths than the sampled tokens"
        assert len(self.finished_N) == len(self.responses.lengths_N), "finished_N is of another number of samples"
        assert len(self.dialogues) in (0, len(self.finished_N)), "dialogues are of another number of samples"

    @staticmethod
    def joined(parts: Sequence[tuple[Rollouts, Sequence[int]]]) -> Rollouts:
        """Chosen samples of each part, one part after the other."""
        stretches = [(rollouts.stretches, chosen) for rollouts, chosen in parts if rollouts.stretches is not None]
        assert len(stretches) in (0, len(parts)), "only some of the parts have stretches"
        return Rollouts(
            responses=Ragged.joined([(rollouts.responses, chosen) for rollouts, chosen in parts]),
            logprobs=Ragged.joined([(rollouts.logprobs, chosen) for rollouts, chosen in parts]),
            finished_N=torch.cat([rollouts.finished_N[list(chosen)] for rollouts, chosen in parts]),
            versions=VersionRuns.joined([(rollouts.versions, chosen) for rollouts, chosen in parts]),
            stretches=Stretches.joined(stretches) if stretches else None,
            dialogues=tuple(rollouts.dialogues[n] for rollouts, chosen in parts if rollouts.dialogues for n in chosen),
        )

    @classmethod
    def empty(cls, num_samples: int, *, conversations: bool = False) -> Rollouts:
        """Samples without a token, on the CPU."""
        lengths_N = torch.zeros(num_samples, dtype=torch.int64)
        none_N, finished_N = Ragged(torch.empty(0, dtype=torch.int64), lengths_N), torch.zeros(num_samples).bool()
        rollouts = cls(none_N, Ragged(torch.empty(0), lengths_N), finished_N, VersionRuns(none_N, none_N))
        if not conversations:
            return rollouts
        stretches = Stretches(Ragged(lengths_N.clone(), torch.ones_like(lengths_N)), none_N)
        return replace(rollouts, stretches=stretches, dialogues=(Dialogue(),) * num_samples)

    def to(self, device: torch.device | str) -> Rollouts:
        """The same with the tokens and log-probs on a device."""
        responses, logprobs = (replace(x, values_T=x.values_T.to(device)) for x in (self.responses, self.logprobs))
        stretches = self.stretches
        if stretches is not None:
            observed = replace(stretches.observed, values_T=stretches.observed.values_T.to(device))
            stretches = replace(stretches, observed=observed)
        return replace(self, responses=responses, logprobs=logprobs, stretches=stretches)

    def replaced(self, rows: Sequence[int], others: Rollouts) -> Rollouts:
        """Samples of which those in `rows` are those of `others`."""
        place = {n: row for row, n in enumerate(rows)}
        parts = [(others, [place[n]]) if n in place else (self, [n]) for n in range(len(self.finished_N))]
        return replace(Rollouts.joined(parts), idle_seconds=others.idle_seconds)

    def extended(self, rows: Sequence[int], more: Rollouts) -> Rollouts:
        """Samples of which those in `rows` go on with further sampled tokens."""
        assert self.stretches is None, "a conversation that goes on is replaced"
        finished_N = self.finished_N.clone()
        finished_N[list(rows)] = more.finished_N
        return Rollouts(
            responses=self.responses.extended(rows, more.responses),
            logprobs=self.logprobs.extended(rows, more.logprobs),
            finished_N=finished_N,
            versions=self.versions.extended(rows, more.versions),
            idle_seconds=more.idle_seconds,
        )

    @property
    def written(self) -> Ragged:
        """All tokens after each prompt, sampled or not. The prompt is the opening of a conversation that has one."""
        return self.responses if self.stretches is None else self.stretches.written(self.responses)

    @property
    def openings(self) -> list[Tensor | None]:
        """Prompts that environments have extended; None: the prompt as it is."""
        if not self.dialogues:
            return [None] * len(self.finished_N)
        return [torch.tensor(talk.opening) if talk.opening else None for talk in self.dialogues]

    @property
    def positions_N(self) -> Tensor:
        """Number of tokens after each prompt, with those of its opening, int64 on the CPU: what limits count."""
        if self.stretches is None:
            return self.responses.lengths_N
        added_N = torch.tensor([talk.added for talk in self.dialogues], dtype=torch.int64)
        return self.stretches.lengths.sums_N + (added_N if self.dialogues else 0)

    @property
    def last_turns(self) -> list[Tensor]:
        """Sampled tokens of each sample's last turn; all of them where there is no environment."""
        rows = self.responses.rows()
        if self.stretches is None:
            return rows
        counts = [int(lengths[-1]) for lengths in self.stretches.lengths.rows()]
        return [row[len(row) - count :] for row, count in zip(rows, counts, strict=True)]

    def before_last_turn(self, sample: int, prompt: Sequence[int]) -> list[int]:
        """All tokens of a conversation before its last turn."""
        assert self.stretches is not None, "a sample of one turn"
        written, last = self.written.rows()[sample], int(self.stretches.lengths.rows()[sample][-1])
        return [*(self.dialogues[sample].opening or prompt), *written[: len(written) - last].tolist()]

    def state_dict(self) -> dict[str, Any]:
        """State as tensors and mappings."""
        stretches = self.stretches
        return {
            "lengths": self.responses.lengths_N,
            "responses": self.responses.values_T,
            "logprobs": self.logprobs.values_T,
            "finished": self.finished_N,
            "versions": _ragged_state(self.versions.versions),
            "version_lengths": _ragged_state(self.versions.lengths),
            "stretches": stretches and _ragged_state(stretches.lengths),
            "observed": stretches and _ragged_state(stretches.observed),
            **({"dialogues": json.dumps([talk.to_json() for talk in self.dialogues])} if self.dialogues else {}),
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Rollouts:
        """Rollouts from a `state_dict`, also from one of earlier versions, which had one weight version per step."""
        lengths_N, stretches = state["lengths"].cpu(), None
        if "weight_version" in state:
            versions = VersionRuns.constant(state["weight_version"], lengths_N)
        else:
            versions = VersionRuns(_ragged_of(state["versions"]), _ragged_of(state["version_lengths"]))
        if state.get("stretches") is not None:
            stretches = Stretches(_ragged_of(state["stretches"]), _ragged_of(state["observed"]))
        return cls(
            responses=Ragged(state["responses"], lengths_N),
            logprobs=Ragged(state["logprobs"], lengths_N),
            finished_N=state["finished"].cpu(),
            versions=versions,
            stretches=stretches,
            dialogues=tuple(Dialogue.from_json(values) for values in json.loads(state.get("dialogues", "[]"))),
        )


def _ragged_state(table: Ragged) -> dict[str, Tensor]:
    return {"values": table.values_T, "lengths": table.lengths_N}


def _ragged_of(state: Mapping[str, Tensor]) -> Ragged:
    return Ragged(state["values"].cpu(), state["lengths"].cpu())
