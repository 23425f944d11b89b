"""Time of a step's rollout without a rehearsal: lengths are drawn as in one, and a share of the device is the cache.

A sweep needs it: rehearsals of variants that differ in the engine alone would repeat the same training, which takes
longest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import fmean

import torch
from torch import Tensor

from megarlhf.architectures.hf_config import architecture_from_hf
from megarlhf.architectures.placements import vllm_placements
from megarlhf.models.settings import DTYPES
from megarlhf.rehearsal.cost_model.decoding import EngineShape, StretchLengths
from megarlhf.rehearsal.cost_model.engine_time import estimate, max_sequences, shape_of
from megarlhf.rehearsal.cost_model.margin import engine_items, total_bytes
from megarlhf.rehearsal.cost_model.pricing import Pricing
from megarlhf.rehearsal.fakes.deal import deal
from megarlhf.rehearsal.fakes.drawn_samples import SampleDraws, conversation_lengths, default_sampled, drawn_stretches
from megarlhf.rehearsal.fakes.engine import forward_bytes
from megarlhf.rehearsal.fakes.lengths import Constant
from megarlhf.rehearsal.request import Request
from megarlhf.rollout.balance import SeenLengths
from megarlhf.rollout.responses import IndexEntry, ResponsePart, Sampling, sample_seed
from megarlhf.rollout.slices import SliceRule
from megarlhf.weights.checkpoint.dtype import resolve_dtype

ROUNDS = 4
"""Steps whose rollouts are estimated: the longest response differs between them."""


def round_seconds(request: Request, rounds: int = ROUNDS) -> float:
    """Seconds of the slowest engine in a step after the first ones, the mean over some steps.

    Raises: ValueError where the cache does not hold the longest sequence.
    """
    first = SliceRule.of(request.cfg.rollout).lag
    return fmean(_seconds_of(request, version) for version in range(first, first + rounds))


def _seconds_of(request: Request, version: int) -> float:
    """Seconds of the slowest engine with one version of the weights."""
    cfg = request.cfg
    shape, cache_bytes = _engine(request)
    prompts, parts, drawn = zip(*_rows(request, version), strict=True)
    seen = SeenLengths()
    seen.record(*_seen(request))
    work, _ = deal(prompts, parts, drawn, cfg.rollout.balance, request.world_size // len(shape.ranks), seen)
    row, _ = estimate(
        work,
        shape,
        cache_bytes,
        Pricing(request.hardware, request.ranks_per_node),
        tokens_per_second=request.rollout_tokens_per_second,
        max_running=max_sequences(cfg.rollout),
    )
    return row.slowest


def _engine(request: Request) -> tuple[EngineShape, int]:
    """Size of an engine, and the bytes of its cache on one rank."""
    cfg, rollout = request.cfg, request.cfg.rollout
    arch, tp = architecture_from_hf(cfg.actor.model.hf_directory()), rollout.tp(cfg.actor)
    name = resolve_dtype("actor", cfg.actor.model, "lm").name if rollout.dtype == "auto" else rollout.dtype
    dtype = DTYPES[name]
    storages = vllm_placements(arch, tp=tp, tp_rank=0, rank=0).storages
    weights = sum(math.prod(size) for size in storages.values()) * dtype.itemsize
    shape = shape_of(arch, tp, 0, dtype, weights)
    if request.hardware.kind != "gpu":
        return shape, rollout.vllm.cpu_cache_gib << 30
    own = weights + forward_bytes(arch, tp) + total_bytes(engine_items(request.margin, tp))
    return shape, max(0, int(request.device_bytes * rollout.vllm.gpu_memory_utilization) - own)


class _Samples:
    """Samples of a request, of drawn lengths."""

    def __init__(self, request: Request) -> None:
        cfg = request.cfg
        self._cfg, self._longest = cfg, cfg.rollout.max_response_tokens
        sampled = request.response_lengths or default_sampled(self._longest, cfg.environment)
        self._talks = conversation_lengths(cfg, turns=request.turns, sampled=sampled, observed=request.observed_lengths)
        self._draws = SampleDraws(sampled, self._talks)

    def draw(self, step: int, sample: int, part: ResponsePart, version: int) -> IndexEntry:
        """Facts of a sample, or of a part of it."""
        seed, sampling = sample_seed(self._cfg.run.seed, step, sample), Sampling(max_tokens=self._longest, end_ids=())
        with_environment = self._talks is not None
        (entry,) = self._draws.index([seed], [part], sampling, version, with_environment=with_environment)
        return entry


def _seen(request: Request) -> tuple[list[Tensor], list[int]]:
    """A prompt and the mean length of a step's whole samples, which engines have seen in earlier steps."""
    cfg, samples = request.cfg, _Samples(request)
    whole = ResponsePart((), cfg.rollout.max_response_tokens)
    entries = [samples.draw(0, n, whole, 0) for n in range(cfg.prompts_drawn * cfg.rollout.num_samples_per_prompt)]
    return [torch.zeros(1)], [round(fmean(sum(entry.stretches) or entry.length for entry in entries))]


def _rows(request: Request, version: int) -> Iterator[tuple[Tensor, ResponsePart, StretchLengths]]:
    """Rows that one version of the weights draws: prompt with earlier parts, the part, and what is drawn of it."""
    cfg, rule, samples = request.cfg, SliceRule.of(request.cfg.rollout), _Samples(request)
    per_prompt = cfg.rollout.num_samples_per_prompt
    prompt_lengths = request.prompt_lengths or Constant(max(1, cfg.data.max_prompt_tokens // 2))
    for step in rule.steps(version, version + rule.lag + 1):
        for n in range(cfg.prompts_drawn * per_prompt):
            number = step * cfg.prompts_drawn + n // per_prompt
            so_far, over = 0, False
            for at in range(version + 1):
                until = rule.until(step, at)
                if over or until <= so_far:
                    continue
                part = ResponsePart(range(so_far), until)
                entry = samples.draw(step, n, part, at)
                over = entry.finished or (entry.dialogue is not None and entry.dialogue.is_over)
                if at == version:
                    prompt = torch.full((min(prompt_lengths.draw(3 * number), cfg.data.max_prompt_tokens),), number)
                    yield torch.cat([prompt, torch.zeros(so_far)]), part, drawn_stretches(entry, part)
                so_far = sum(entry.stretches) or so_far + entry.length
