"""The user's own parts of the policy loss: surrogate, ratio, token weights and KL estimator.

Each is a function of tensors. Before a run it is called on made-up tokens, on every rank: it must give a finite number
for each token, through which the gradient flows, and the same numbers in every call and on every rank. In the run each
result is checked too.

Legend: T response tokens end to end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megarlhf.algo.kl import KL_ESTIMATORS
from megarlhf.algo.policy import RATIOS, SURROGATES, Bounds, Surrogate
from megarlhf.algo.segments import Segments
from megarlhf.own_code.advantage import require_parameters
from megarlhf.own_code.failures import describe_failure, is_user_error, short
from megarlhf.own_code.guarded import unchanged_process
from megarlhf.own_code.load import is_path, load_function

SurrogateFunction = Callable[[Tensor, Tensor, Tensor, Bounds], Surrogate]
RatioFunction = Callable[[Tensor, Segments], Tensor]
EstimatorFunction = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class _Term:
    """A kind of function: its words in messages, its parameters, and whether a gradient must flow through it."""

    what: str
    parameters: tuple[str, ...]
    differentiable: bool


_SURROGATE = _Term("surrogate", ("logprobs_T", "log_ratio_T", "advantages_T", "bounds"), True)
_RATIO = _Term("ratio", ("log_ratio_T", "responses"), True)
_WEIGHTS = _Term("token weights", ("logprobs_T", "old_logprobs_T", "advantages_T", "responses"), False)
_ESTIMATOR = _Term("KL estimator", ("log_ratio_T",), True)


def surrogate_of(name: str) -> SurrogateFunction:
    """The surrogate of a name of ours or an import path. Raises: ValueError."""
    return _own_surrogate(name) if is_path(name) else SURROGATES[name]  # type: ignore[index]


def ratio_of(name: str) -> RatioFunction:
    """The ratio of a name of ours or an import path, as a function of log-ratios. Raises: ValueError."""
    return _own(name, _RATIO) if is_path(name) else RATIOS[name]  # type: ignore[index]


def estimator_of(name: str) -> EstimatorFunction:
    """The KL estimator of a name of ours or an import path. Raises: ValueError."""
    return _own(name, _ESTIMATOR) if is_path(name) else KL_ESTIMATORS[name]


def token_weights_of(name: str) -> Callable[[Tensor, Tensor, Tensor, Segments], Tensor]:
    """The user's function of weights. Its result has no gradient. Raises: ValueError."""
    function = _own(name, _WEIGHTS)
    return lambda *arguments: function(*(_without_gradient(value) for value in arguments)).detach()


def _without_gradient(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _own(name: str, term: _Term) -> Callable[..., Tensor]:
    """The user's function, whose result is checked in each call."""
    label, function = f"{term.what} {name!r}", load_function(name, term.what)

    def call(*arguments: Any) -> Tensor:
        result = _called(function, label, [_untouched(value) for value in arguments])
        return _require_numbers(result, label, arguments, flows=term.differentiable)

    return call


def _own_surrogate(name: str) -> SurrogateFunction:
    """The user's surrogate. It returns the loss of each token, or that and the tokens at which a bound is in force."""
    label, function = f"{_SURROGATE.what} {name!r}", load_function(name, _SURROGATE.what)

    def call(logprobs_T: Tensor, log_ratio_T: Tensor, advantages_T: Tensor, bounds: Bounds) -> Surrogate:
        given = (logprobs_T, log_ratio_T, advantages_T)
        result = _called(function, label, [*map(_untouched, given), bounds])
        loss_T, clipped_T = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        loss_T = _require_numbers(loss_T, label, given, flows=True)
        if clipped_T is None:
            return Surrogate(loss_T, torch.zeros_like(loss_T, dtype=torch.bool))
        if not isinstance(clipped_T, Tensor) or clipped_T.dtype != torch.bool or clipped_T.shape != loss_T.shape:
            raise ValueError(
                f"{label} returned {_describe(clipped_T)} for the clipped tokens, expected a bool tensor of shape "
                f"{tuple(loss_T.shape)}; return the loss alone if nothing is clipped"
            )
        return Surrogate(loss_T, clipped_T)

    return call


def _untouched(value: Any) -> Any:
    """A copy of a tensor, through which the gradient flows: the function may write to what it gets."""
    return value.clone() if isinstance(value, Tensor) else value


def _called(function: Callable[..., Any], label: str, arguments: list[Any]) -> Any:
    try:
        return function(*arguments)
    except BaseException as error:
        if not is_user_error(error):
            raise
        raise ValueError(f"{label} {describe_failure(function, error)}") from error


def _require_numbers(value: Any, label: str, arguments: Sequence[Any], *, flows: bool) -> Tensor:
    """A finite number for each token. `flows`: a gradient must flow through it. Raises: ValueError."""
    like_T = arguments[0]
    if not isinstance(value, Tensor) or value.shape != like_T.shape or not value.is_floating_point():
        raise ValueError(
            f"{label} returned {_describe(value)}, expected a number for each token: a tensor of floating-point "
            f"numbers of shape {tuple(like_T.shape)}"
        )
    if flows and len(value) and torch.is_grad_enabled() and _takes_gradient(arguments) and not value.requires_grad:
        raise ValueError(
            f"{label} returned numbers through which no gradient flows, so that nothing would be learnt; compute them "
            "from what it gets, without detach() or torch.no_grad()"
        )
    wrong_T = ~value.detach().isfinite()
    if bool(wrong_T.any()):
        tensors = [argument.detach() for argument in arguments if isinstance(argument, Tensor)]
        if all(bool(tensor.isfinite().all()) for tensor in tensors):
            first = int(wrong_T.nonzero()[0])
            got = ", ".join(f"{float(tensor[first]):g}" for tensor in tensors)
            raise ValueError(
                f"{label} returned {float(value[first]):g} for a token whose inputs are finite: {got}; look for "
                "divisions by zero and logarithms of negative numbers"
            )
    return value.to(like_T)


def _takes_gradient(arguments: Sequence[Any]) -> bool:
    return any(isinstance(argument, Tensor) and argument.requires_grad for argument in arguments)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}, {str(value.dtype).removeprefix('torch.')}"
    return short(value)


def try_terms(names: Iterator[tuple[str, str]] | list[tuple[str, str]]) -> dict[str, str]:
    """Call each of the user's functions on made-up tokens. `names`: (kind, import path), as `KINDS` has them.

    Returns: a digest of the numbers of each, which all ranks must agree on. Raises: ValueError.
    """
    return {f"{TERMS[kind].what} {name!r}": _digest_of_trial(TERMS[kind], name) for kind, name in names}


TERMS = {"policy_loss": _SURROGATE, "ratio": _RATIO, "token_weights": _WEIGHTS, "estimator": _ESTIMATOR}
"""Kinds of functions by the key of the configuration that names them."""


def _digest_of_trial(term: _Term, name: str) -> str:
    label = f"{term.what} {name!r}"
    first, second = (_trial(term, name, label) for _ in range(2))
    if first != second:
        raise ValueError(
            f"{label} gave other numbers for the same tokens when it was called again; it must not depend on time, on "
            "chance or on earlier calls"
        )
    return first


_LENGTHS = (3, 1, 5, 2)
"""Tokens of the made-up responses."""


def _trial(term: _Term, name: str, label: str) -> str:
    """Digest of the function's numbers for made-up tokens of four responses, and of their gradients.

    It is also called without tokens, as a micro-batch may have none that is learnt, and with half of the responses:
    numbers that depend on the other responses of a micro-batch would depend on how the mini-batch is cut.
    """
    require_parameters(load_function(name, term.what), term.parameters, label)
    logprobs_T, results = _called_with(term, name, range(4))
    _called_with(term, name, range(0))
    parts_T = torch.cat([_called_with(term, name, part)[1][0] for part in (range(2), range(2, 4))])
    if not torch.allclose(results[0], parts_T, rtol=1e-4, atol=1e-6):
        raise ValueError(
            f"{label} gave other numbers for a response when it was called without the others; the tokens are those of "
            "one micro-batch, so a function must not average over them: algo.loss_average says what divides the loss"
        )
    if term.differentiable:
        results.append(_gradient(results[0], logprobs_T, label))
    content = b"".join(tensor.detach().double().numpy().tobytes() for tensor in results)
    return hashlib.sha256(content).hexdigest()


def _called_with(term: _Term, name: str, chosen: range) -> tuple[Tensor, list[Tensor]]:
    """Log-probs of some of the made-up responses, and the function's results for them."""
    generator = torch.Generator().manual_seed(0)
    begin, end = sum(_LENGTHS[: chosen.start]), sum(_LENGTHS[: chosen.stop])
    old_T, advantages_T, change_T = (torch.randn(sum(_LENGTHS), generator=generator)[begin:end] for _ in range(3))
    logprobs_T = (old_T + 0.3 * change_T).requires_grad_()
    responses = Segments(torch.tensor([_LENGTHS[n] for n in chosen], dtype=torch.int64), end - begin)
    log_ratio_T = logprobs_T - old_T
    with unchanged_process(gradients=True):
        if term is _SURROGATE:
            return logprobs_T, list(surrogate_of(name)(logprobs_T, log_ratio_T, advantages_T, Bounds()))
        if term is _WEIGHTS:
            return logprobs_T, [token_weights_of(name)(logprobs_T, old_T, advantages_T, responses)]
        arguments = (log_ratio_T, responses) if term is _RATIO else (log_ratio_T,)
        return logprobs_T, [_own(name, term)(*arguments)]


def _gradient(result_T: Tensor, logprobs_T: Tensor, label: str) -> Tensor:
    """Gradient of the sum. Raises: ValueError if it is not finite."""
    (gradient_T,) = torch.autograd.grad(result_T.sum(), [logprobs_T], allow_unused=True)
    gradient_T = torch.zeros_like(logprobs_T) if gradient_T is None else gradient_T
    if not bool(gradient_T.isfinite().all()):
        raise ValueError(
            f"{label} gave gradients that are not finite, {short(gradient_T.tolist())}; look for roots and divisions "
            "at zero"
        )
    return gradient_T
