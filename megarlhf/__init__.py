"""megarlhf: alignment of language models at Megatron scale.

The public surface is the names of `__all__`: `import megarlhf`, then `megarlhf.run(...)`. Everything else is private
and may change in any version. A name is imported when it is first used, so that `import megarlhf` takes no time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megarlhf.algo.advantages import group_relative as group_relative
    from megarlhf.algo.advantages import leave_one_out as leave_one_out
    from megarlhf.algo.kl import KL_ESTIMATORS as KL_ESTIMATORS
    from megarlhf.algo.policy import RATIOS as RATIOS
    from megarlhf.algo.policy import SURROGATES as SURROGATES
    from megarlhf.api import family_parts as family_parts
    from megarlhf.api.configuration import check as check
    from megarlhf.api.configuration import load_config as load_config
    from megarlhf.api.loop import Loop as Loop
    from megarlhf.api.parts import convert as convert
    from megarlhf.api.parts import copy_plan as copy_plan
    from megarlhf.api.parts import gae as gae
    from megarlhf.api.parts import pack as pack
    from megarlhf.api.parts import rehearse as rehearse
    from megarlhf.api.result import RunResult as RunResult
    from megarlhf.api.run import RunFailed as RunFailed
    from megarlhf.api.run import run as run
    from megarlhf.api.sample_batch import SampleBatch as SampleBatch
    from megarlhf.data.tokenizers.tokenizer import load_tokenizer as load_tokenizer
    from megarlhf.kernels.dispatch import linear_token_logprobs as linear_token_logprobs
    from megarlhf.kernels.dispatch import token_logprobs as token_logprobs
    from megarlhf.layout import MeshLayout as Layout
    from megarlhf.own_code.advantage import Advantage as Advantage
    from megarlhf.own_code.advantage import advantage as advantage
    from megarlhf.resume.signals import StopRun as StopRun
    from megarlhf.rollout.environments.answer import Answer as Answer
    from megarlhf.rollout.environments.answer import Turn as Turn
    from megarlhf.trainers.rl.advantages import ADVANTAGES as ADVANTAGES
    from megarlhf.trainers.rl.advantages import AdvantageInputs as AdvantageInputs
    from megarlhf.trainers.run.observers import Step as Step
    from megarlhf.trainers.run.observers import StepSamples as StepSamples

__version__ = "0.1.0"

_EXPORTS = {
    "ADVANTAGES": "megarlhf.trainers.rl.advantages:ADVANTAGES",
    "Advantage": "megarlhf.own_code.advantage:Advantage",
    "AdvantageInputs": "megarlhf.trainers.rl.advantages:AdvantageInputs",
    "Answer": "megarlhf.rollout.environments.answer:Answer",
    "KL_ESTIMATORS": "megarlhf.algo.kl:KL_ESTIMATORS",
    "Layout": "megarlhf.layout:MeshLayout",
    "Loop": "megarlhf.api.loop:Loop",
    "RATIOS": "megarlhf.algo.policy:RATIOS",
    "RunFailed": "megarlhf.api.run:RunFailed",
    "RunResult": "megarlhf.api.result:RunResult",
    "SURROGATES": "megarlhf.algo.policy:SURROGATES",
    "SampleBatch": "megarlhf.api.sample_batch:SampleBatch",
    "Step": "megarlhf.trainers.run.observers:Step",
    "StepSamples": "megarlhf.trainers.run.observers:StepSamples",
    "StopRun": "megarlhf.resume.signals:StopRun",
    "Turn": "megarlhf.rollout.environments.answer:Turn",
    "advantage": "megarlhf.own_code.advantage:advantage",
    "check": "megarlhf.api.configuration:check",
    "convert": "megarlhf.api.parts:convert",
    "copy_plan": "megarlhf.api.parts:copy_plan",
    "family_parts": "megarlhf.api.family_parts",
    "gae": "megarlhf.api.parts:gae",
    "group_relative": "megarlhf.algo.advantages:group_relative",
    "leave_one_out": "megarlhf.algo.advantages:leave_one_out",
    "linear_token_logprobs": "megarlhf.kernels.dispatch:linear_token_logprobs",
    "load_config": "megarlhf.api.configuration:load_config",
    "load_tokenizer": "megarlhf.data.tokenizers.tokenizer:load_tokenizer",
    "pack": "megarlhf.api.parts:pack",
    "rehearse": "megarlhf.api.parts:rehearse",
    "run": "megarlhf.api.run:run",
    "token_logprobs": "megarlhf.kernels.dispatch:token_logprobs",
}
"""`module:name` of each public name. The imports above tell editors and type checkers the same; a test compares."""

__all__ = [
    "ADVANTAGES",
    "KL_ESTIMATORS",
    "RATIOS",
    "SURROGATES",
    "Advantage",
    "AdvantageInputs",
    "Answer",
    "Layout",
    "Loop",
    "RunFailed",
    "RunResult",
    "SampleBatch",
    "Step",
    "StepSamples",
    "StopRun",
    "Turn",
    "__version__",
    "advantage",
    "check",
    "convert",
    "copy_plan",
    "family_parts",
    "gae",
    "group_relative",
    "leave_one_out",
    "linear_token_logprobs",
    "load_config",
    "load_tokenizer",
    "pack",
    "rehearse",
    "run",
    "token_logprobs",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import warnings
    from importlib import import_module

    module, _, attribute = _EXPORTS[name].partition(":")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="megatron")  # about packages that a machine without a GPU lacks
        imported = import_module(module)
        globals()[name] = value = getattr(imported, attribute) if attribute else imported
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
