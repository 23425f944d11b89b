"""The user's own code that a configuration names: checked before the start, listed, and part of the run's identity."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from megarlhf.architectures.own_families import family_sources
from megarlhf.config import EvaluateConfig, GenerateConfig, RLConfig
from megarlhf.data.sources.environment_source import is_environment, look_at_source
from megarlhf.data.sources.procedural import parse
from megarlhf.own_code.advantage import load_advantage
from megarlhf.own_code.digest import Source, source_of
from megarlhf.own_code.load import is_path
from megarlhf.own_code.policy_terms import TERMS, try_terms
from megarlhf.own_code.step_code import load_observer, load_sampler
from megarlhf.rollout.environments.checks import check_environment
from megarlhf.rollout.environments.look import look_at


class OwnCode(NamedTuple):
    """A name of user code in the configuration."""

    key: str
    """Key of the configuration, such as `algo.advantage`."""
    what: str
    """Kind in messages, such as "advantage"."""
    path: str
    """Import path, `package.module:name`."""
    look: Callable[[], Source] | None = None
    """Check in another process, which returns the source. None: the module is imported in this one."""

    def source(self) -> Source:
        """The source. Raises: ValueError as `look`."""
        return source_of(self.path, self.what) if self.look is None else self.look()


_LOADERS: Mapping[str, Callable[[str], object]] = {
    "advantage": load_advantage,
    "sampler": load_sampler,
    "metric": partial(load_observer, what="metric"),
    "observer": partial(load_observer, what="observer"),
}
"""Checks of the kinds that are not tried elsewhere."""


def own_code_of(cfg: Any) -> list[OwnCode]:
    """All user code of a configuration except model families, which are modules."""
    return [*_of_rl(cfg), *_of_environment(cfg), *_of_rewards(cfg), *_of_data(cfg), *_of_observers(cfg)]


def own_terms(cfg: RLConfig) -> list[tuple[str, str]]:
    """Own parts of the policy loss: kind, as in `policy_terms.TERMS`, and import path."""
    algo = cfg.algo
    named = {
        "policy_loss": algo.policy_loss,
        "ratio": algo.ratio,
        "token_weights": algo.token_weights or "",
        "estimator": algo.kl.estimator,
    }
    return [(kind, path) for kind, path in named.items() if is_path(path)]


def _of_rl(cfg: Any) -> Iterator[OwnCode]:
    if not isinstance(cfg, RLConfig):
        return
    if is_path(cfg.algo.advantage):
        yield OwnCode("algo.advantage", "advantage", cfg.algo.advantage)
    for kind, path in own_terms(cfg):
        key = "algo.kl.estimator" if kind == "estimator" else f"algo.{kind}"
        yield OwnCode(key, TERMS[kind].what, path)
    if cfg.train.sampler is not None:
        yield OwnCode("train.sampler", "sampler", cfg.train.sampler)


def _of_rewards(cfg: Any) -> Iterator[OwnCode]:
    if isinstance(cfg, RLConfig | GenerateConfig | EvaluateConfig):
        for number, reward in enumerate(cfg.rewards):
            if reward.rule is not None and is_path(reward.rule):
                yield OwnCode(f"rewards[{number}].rule", "reward rule", reward.rule)
        if cfg.eval.accuracy is not None and is_path(cfg.eval.accuracy):
            yield OwnCode("eval.accuracy", "reward rule", cfg.eval.accuracy)


def _of_environment(cfg: Any) -> Iterator[OwnCode]:
    if (environment := getattr(cfg, "environment", None)) is not None:
        if (function := environment.function) is not None:
            look = None
            if (python := environment.interpreter) is not None:
                look = partial(look_at, function, environment.args, environment.interface, python)
            yield OwnCode("environment.function", "environment", function, look)
        for number, tool in enumerate(environment.tools):
            if tool.function is not None:
                yield OwnCode(f"environment.tools[{number}]", "tool", tool.function)


def _of_data(cfg: Any) -> Iterator[OwnCode]:
    for key, sources in cfg.data.sources().items() if hasattr(cfg.data, "sources") else ():
        for source in sources:
            if source.adapter is not None and is_path(source.adapter):
                yield OwnCode(f"{key}: adapter", "adapter", source.adapter)
            if is_environment(source.path):
                yield OwnCode(key, "prompts", parse(source.path).task, partial(look_at_source, str(source.path)))


def _of_observers(cfg: Any) -> Iterator[OwnCode]:
    if (observe := getattr(cfg, "observe", None)) is not None:
        for key, what in (("metrics", "metric"), ("observers", "observer")):
            yield from (OwnCode(f"observe.{key}", what, path) for path in getattr(observe, key))


def own_sources(cfg: Any) -> dict[str, str]:
    """Digests of the source of user code, by kind and name, for a resume point. Code that makes records is left out:
    the digest of the samples has them. Raises: ValueError where another Python runs the code, and cannot."""
    made = [own for own in own_code_of(cfg) if own.what not in ("adapter", "prompts")]
    return {f"{own.what} {own.path}": own.source().digest for own in made} | family_sources(cfg.roles())


def check_own_code(cfg: Any) -> list[str]:
    """Load all user code, call the own parts of the policy loss on made-up tokens, and list it. Returns notes.

    Rewards and adapters are tried with the data. Raises: ValueError.
    """
    for own in own_code_of(cfg):
        if (loader := _LOADERS.get(own.what)) is not None:
            loader(own.path)
    if isinstance(cfg, RLConfig):
        try_terms(own_terms(cfg))
    environment = getattr(cfg, "environment", None)
    if environment is not None and environment.function is not None and environment.python is None:
        check_environment(environment.function, environment.args, environment.interface)
    families = [f"own code: {name} (source {digest[:12]})" for name, digest in family_sources(cfg.roles()).items()]
    return families + list(dict.fromkeys(map(_describe, own_code_of(cfg))))


def _describe(own: OwnCode) -> str:
    try:
        source = own.source()
    except ValueError as error:
        raise ValueError(f"{own.key}: {error}") from error
    return f"own code: {own.key} = {own.path} ({source.file}, source {source.digest[:12]})"
