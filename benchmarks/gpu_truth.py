"""Inputs of a shape, fp64 truth about them, and the gate every candidate has to pass before it is timed.

Legend: T tokens, H hidden, V vocabulary columns of one rank, S some rows, C some columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Gives = Literal["logprob+entropy", "logprob", "mean loss"]
GRADIENT_TOLERANCE = 0.02
"""Relative, in norm. Rounding a gradient to bf16 is 0.2%, of logits and their gradient as much again; sums kept in
bf16 over a few dozen chunks come to 1.5%. A missing term or a wrong sign is 10% and more."""
_LOGITS_TOLERANCE = 1e-3
"""Nats. fp32 arithmetic on the same bf16 logits comes to 1e-5, a log-prob rounded to bf16 to 3e-2."""
_SPREAD = 2.0


@dataclass(frozen=True)
class Shape:
    """One problem. `parts` 8: one rank's shard under tensor parallelism 8, the collective left out."""

    kind: Literal["logits", "linear"]
    tokens: int
    vocab: int
    parts: int
    hidden: int = 0

    @property
    def columns(self) -> int:
        return self.vocab // self.parts

    @property
    def name(self) -> str:
        return (f"H={self.hidden} " if self.hidden else "") + f"V={self.vocab}" + f"/{self.parts}" * (self.parts > 1)


@dataclass(frozen=True)
class Inputs:
    shape: Shape
    tensors: tuple[Tensor, ...]
    """(logits_TV,) or (hidden_TH, weight_VH), bf16."""
    labels_T: Tensor
    by_logprob_T: Tensor
    by_entropy_T: Tensor

    def upstream(self, gives: Gives, sign: int) -> tuple[Tensor, ...]:
        """The gradients that come into the backward: of log-probs and entropy where these are given."""
        if gives == "mean loss":
            return (torch.tensor(float(sign), device=self.labels_T.device),)
        some = (sign * self.by_logprob_T,)
        return (*some, self.by_entropy_T) if gives == "logprob+entropy" else some

    def logits64(self, rows: slice) -> Tensor:
        """These rows' logits in fp64."""
        if self.shape.kind == "logits":
            return self.tensors[0][rows].double()
        hidden_TH, weight_VH = self.tensors
        wide_SH = hidden_TH[rows].double()
        return torch.cat([wide_SH @ part_VH.double().t() for part_VH in weight_VH.split(8192)], 1)


def make_inputs(shape: Shape, device: torch.device) -> Inputs:
    """Logits of standard deviation 2; every second row is peaked at its label, by 12."""
    generator = torch.Generator(device).manual_seed(0)
    tokens, columns = shape.tokens, shape.columns

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, dtype=torch.bfloat16, device=device, generator=generator)

    labels_T = torch.randint(columns, (tokens,), device=device, generator=generator)
    if shape.kind == "logits":
        logits_TV = normal(tokens, columns).mul_(_SPREAD)
        logits_TV[::2].scatter_add_(1, labels_T[::2, None], logits_TV.new_full(labels_T[::2, None].shape, 12.0))
        tensors: tuple[Tensor, ...] = (logits_TV,)
    else:
        hidden_TH = normal(tokens, shape.hidden)
        weight_VH = normal(columns, shape.hidden).mul_(_SPREAD * shape.hidden**-0.5)
        hidden_TH[::2] += weight_VH[labels_T[::2]] * (12.0 / _SPREAD**2)
        tensors = (hidden_TH, weight_VH)
    by_2T = torch.randn(2, tokens, device=device, generator=generator) / tokens
    return Inputs(shape, tensors, labels_T, by_2T[0], by_2T[1])


@dataclass(frozen=True)
class Truth:
    """fp64 on all rows for the values; gradients on some rows (of logits, of hidden states) and columns (weight)."""

    logprobs_T: Tensor
    entropy_T: Tensor
    rows_S: Tensor
    columns_C: Tensor
    gradients: dict[Gives, tuple[Tensor, ...]]
    """By what a candidate gives: (of logits [S, V],) or (of hidden states [S, H], of the weight [C, H])."""
    value_tolerance: float


def make_truth(inputs: Inputs, num_rows: int = 32) -> Truth:
    shape, labels_T = inputs.shape, inputs.labels_T
    device = labels_T.device
    rows_S = torch.linspace(0, shape.tokens - 1, num_rows, device=device).long().unique()
    spread_C = torch.linspace(0, shape.columns - 1, num_rows // 2, device=device).long()
    columns_C = torch.cat([labels_T[rows_S[: num_rows // 2]], spread_C]).unique()
    ways: tuple[Gives, ...] = ("logprob+entropy", "logprob", "mean loss")
    values: list[Tensor] = []
    of_rows: dict[str, list[Tensor]] = {way: [] for way in ways}
    of_columns: dict[str, list[Tensor]] = {way: [] for way in ways}
    largest = 0.0
    for rows in _row_blocks(shape.tokens):
        z_TV = inputs.logits64(rows)
        largest = max(largest, float(z_TV.abs().max()))
        log_TV = z_TV.log_softmax(1)
        entropy_T = -(log_TV.exp() * log_TV).sum(1)
        values.append(torch.stack([log_TV.gather(1, labels_T[rows, None])[:, 0], entropy_T]))
        chosen_S = rows_S[(rows_S >= rows.start) & (rows_S < rows.stop)] - rows.start
        for way in ways:
            by_T, by_h_T = _upstream64(inputs, way, rows)
            some = (log_TV, entropy_T, labels_T[rows], by_T, by_h_T)
            chosen = [tensor[chosen_S] for tensor in some]
            of_rows[way].append(_gradient(*chosen, columns_C=torch.arange(shape.columns, device=device)))
            if shape.kind == "linear":
                of_columns[way].append(_gradient(*some, columns_C))
    rounding = 2.0**-8 * largest if shape.kind == "linear" else 0.0
    gradients = {way: _through(inputs, torch.cat(of_rows[way]), of_columns[way]) for way in ways}
    logprobs_T, entropy_T = torch.cat(values, 1)
    return Truth(logprobs_T, entropy_T, rows_S, columns_C, gradients, _LOGITS_TOLERANCE + rounding)


def _row_blocks(tokens: int) -> Iterator[slice]:
    for start in range(0, tokens, 512):
        yield slice(start, min(start + 512, tokens))


def _upstream64(inputs: Inputs, way: Gives, rows: slice) -> tuple[Tensor, Tensor]:
    by_T = inputs.by_logprob_T[rows].double()
    if way == "mean loss":
        by_T = torch.full_like(by_T, 1.0 / inputs.shape.tokens)
    by_h_T = inputs.by_entropy_T[rows].double()
    return by_T, by_h_T if way == "logprob+entropy" else torch.zeros_like(by_h_T)


def _gradient(
    log_TV: Tensor, entropy_T: Tensor, labels_T: Tensor, by_T: Tensor, by_h_T: Tensor, columns_C: Tensor
) -> Tensor:
    """by ([z is the label's] - p) - by_h p (log p + entropy), in these columns."""
    log_TC = log_TV[:, columns_C]
    is_label_TC = (labels_T[:, None] == columns_C).double()
    p_TC = log_TC.exp()
    return by_T[:, None] * (is_label_TC - p_TC) - by_h_T[:, None] * p_TC * (log_TC + entropy_T[:, None])


def _through(inputs: Inputs, of_logits_SV: Tensor, of_columns: list[Tensor]) -> tuple[Tensor, ...]:
    """From the logits' gradient to that of the inputs."""
    if inputs.shape.kind == "logits":
        return (of_logits_SV,)
    hidden_TH, weight_VH = inputs.tensors
    parts = zip(of_logits_SV.split(8192, 1), weight_VH.split(8192), strict=True)
    of_hidden_SH = sum((grad_SV @ part_VH.double() for grad_SV, part_VH in parts), of_logits_SV.new_zeros(()))
    return of_hidden_SH, torch.cat(of_columns).t() @ hidden_TH.double()


@dataclass(frozen=True)
class Verdict:
    """Errors against the truth, and why the candidate is refused (None: it is not)."""

    errors: dict[str, float]
    reason: str | None


def judge_values(truth: Truth, gives: Gives, sign: int, outputs: tuple[Tensor, ...]) -> Verdict:
    """Log-probs (or their mean) and entropy, the largest error in nats."""
    want = [truth.logprobs_T.mean() if gives == "mean loss" else truth.logprobs_T]
    got = [outputs[0].double() * sign]
    if gives == "logprob+entropy":
        want.append(truth.entropy_T)
        got.append(outputs[1].double())
    errors = {
        name: float((actual - true).abs().max())
        for name, actual, true in zip(("value", "entropy"), got, want, strict=False)
    }
    # Results that are stored in bf16 are as right as that allows; the row says so.
    stored = 2.0**-8 * float(want[0].abs().max()) if outputs[0].dtype == torch.bfloat16 else 0.0
    return _verdict(errors, truth.value_tolerance + stored, "nats")


def judge_gradients(truth: Truth, gives: Gives, gradients: tuple[Tensor, ...]) -> Verdict:
    """Relative errors in norm, on the truth's rows and columns."""
    parts = [gradients[0][truth.rows_S]]
    if len(gradients) > 1:
        parts.append(gradients[1][truth.columns_C])
    names = ("gradient",) if len(parts) == 1 else ("hidden gradient", "weight gradient")
    errors = {
        name: float((got.double() - want).norm() / want.norm())
        for name, got, want in zip(names, parts, truth.gradients[gives], strict=True)
    }
    return _verdict(errors, GRADIENT_TOLERANCE, "of the norm")


def _verdict(errors: dict[str, float], allowed: float, unit: str) -> Verdict:
    # `not <=`: NaN is refused too.
    bad: list[Any] = [f"{name} off by {error:.3g} {unit}" for name, error in errors.items() if not error <= allowed]
    return Verdict(errors, f"{', '.join(bad)}; allowed {allowed:.3g}" if bad else None)
