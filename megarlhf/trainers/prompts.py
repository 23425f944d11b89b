"""What rl, generate and eval share: prompts, tokenizer and the engine."""

from __future__ import annotations

from pathlib import Path

from megarlhf.config import PromptDataConfig, RolloutConfig
from megarlhf.data.samples import PromptSample, build_prompts
from megarlhf.data.sources import load_records
from megarlhf.data.tokenizer import Tokenizer, load_tokenizer
from megarlhf.models.role import Role
from megarlhf.models.weights import parameter_dtype
from megarlhf.rollout.engine import RolloutEngine, Sampling
from megarlhf.trainers.session import Session


def load_prompts(
    data: PromptDataConfig, model_path: Path, session: Session, max_heldout: int | None
) -> tuple[list[PromptSample], list[PromptSample], Tokenizer]:
    """Training and held-out prompts, on every rank."""
    tokenizer = load_tokenizer(model_path)
    found: list[list[PromptSample]] = []
    for path in (data.train, data.heldout):
        if path is None:
            found.append([])
            continue
        fields = ("prompt",) if data.template == "plain" else ()
        prompts, skipped = build_prompts(
            load_records(path, fields=fields),
            tokenizer,
            max_prompt_tokens=data.max_prompt_tokens,
            template=data.template,
        )
        session.note(f"{path}: {skipped.describe()}")
        found.append(prompts)
    return found[0], found[1][:max_heldout], tokenizer


def make_engine(rollout: RolloutConfig, actor: Role, max_prompt_tokens: int, micro_batch_samples: int) -> RolloutEngine:
    """The configured engine, still without weights."""
    if rollout.engine == "megatron":
        from megarlhf.rollout.megatron_engine import MegatronEngine

        return MegatronEngine(actor.part, micro_batch_samples)
    from megarlhf.rollout.vllm_engine import VllmEngine

    model = actor.section.model
    return VllmEngine(
        model.path,
        parameter_dtype(model),
        rollout,
        max_prompt_tokens + rollout.max_response_tokens,
        actor.mesh.runtime,
    )


def sampling_of(rollout: RolloutConfig, tokenizer: Tokenizer, *, greedy: bool = False) -> Sampling:
    """How this configuration draws responses."""
    return Sampling(
        max_tokens=rollout.max_response_tokens,
        temperature=rollout.temperature,
        greedy=greedy,
        eos_id=tokenizer.eos_id,
    )
