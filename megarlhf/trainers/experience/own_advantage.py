"""An advantage of the user's own: called on the whole step, checked, and compared between ranks.

Legend: N samples of the step, T response tokens of all of them.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from megarlhf.collective_errors import require_same, user_code
from megarlhf.columns import Ragged
from megarlhf.experience import Experience
from megarlhf.own_code.advantage import Advantage
from megarlhf.own_code.failures import short
from megarlhf.own_code.guarded import call

ALWAYS = ("token_rewards",)
"""Columns that an own advantage gets without declaring them, where the step has them."""
OF_KL = ("old_logprobs", "ref_logprobs")
"""Columns that it gets where the reward has a KL."""


def whole_step(experience: Experience, advantage: Advantage, *, has_kl: bool) -> Experience:
    """The step with the columns that the advantage reads, whole on every rank. Collective."""
    wanted = {*advantage.reads, *ALWAYS, *(OF_KL if has_kl else ())}
    columns = {name: column for name, column in experience.columns.items() if name in wanted}
    return replace(experience, columns=columns).replicated()


def own_columns(
    path: str, advantage: Advantage, whole: Experience, inputs_of: Callable[[Experience], Any], *, twice: bool
) -> dict[str, Ragged]:
    """Columns that the user's advantage makes for the whole step, the same on every rank. Collective.

    inputs_of: makes its inputs of an experience, which it may change. twice: call it twice and compare

    Raises: OwnCodeError, on every rank, for an error of the function, a wrong result, or one that differs between calls
    or ranks.
    """
    label = f"advantage {path!r}"
    columns: dict[str, Ragged] = {}
    digests = []
    with user_code():
        for _ in range(2 if twice else 1):
            columns = _call(advantage, label, inputs_of(copy.deepcopy(whole)), whole.rollout_logprobs)
            digests.append(_digest(columns))
        if len(set(digests)) > 1:
            raise ValueError(
                f"{label} gave other numbers for the same samples when it was called again; it must not depend on "
                "time, on chance or on earlier calls"
            )
    require_same({label: digests[0]}, "it must not depend on the rank, on time or on chance")
    return columns


def _call(advantage: Advantage, label: str, inputs: Any, like: Ragged) -> dict[str, Ragged]:
    result = call(advantage.compute, label, inputs)
    named = result if isinstance(result, Mapping) else {"advantages": result}
    if set(named) != set(advantage.writes):
        raise ValueError(
            f"{label} returned the columns {', '.join(map(str, named)) or 'none'}, and declares writes = "
            f"{advantage.writes!r}; return a mapping of these columns, or a tensor for advantages alone"
        )
    return {name: _column(f"{label} returned {name} as", value, like) for name, value in named.items()}


def _column(what: str, value: Any, like: Ragged) -> Ragged:
    """A column from a number for each response or for each of its tokens."""
    lengths_N, like_T = like.lengths_N, like.values_T
    if not isinstance(value, Tensor):
        raise ValueError(f"{what} {short(value)}, expected a tensor; return one number for each response or each token")
    if value.shape not in ((len(lengths_N),), like_T.shape) or not value.is_floating_point():
        raise ValueError(
            f"{what} a tensor of shape {tuple(value.shape)}, {str(value.dtype).removeprefix('torch.')}; expected "
            f"floating-point numbers, one for each of {len(lengths_N)} responses or of their {len(like_T)} tokens"
        )
    if not bool(value.isfinite().all()):
        wrong = int((~value.isfinite()).sum())
        raise ValueError(f"{what} {wrong} of {len(value)} numbers that are not finite; look for divisions by zero")
    value = value.detach().to(like_T)
    return Ragged(value, lengths_N) if value.shape == like_T.shape else like.repeat_per_token(value)


def _digest(columns: Mapping[str, Ragged]) -> str:
    digest = hashlib.sha256()
    for name in sorted(columns):
        digest.update(name.encode() + columns[name].values_T.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
