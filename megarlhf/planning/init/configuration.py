"""The configuration that `megarlhf init` writes for a model and data that it has looked at.

What could not be decided by what was seen is collected in sentences, which stand at the head of the file and are
printed.
"""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarlhf.architectures.architecture import Architecture
from megarlhf.config import ParallelConfig, PromptDataConfig, RoleConfig
from megarlhf.planning.init.inspection import Command, DataLook, ModelLook, quantile
from megarlhf.planning.layout import check_role

GPU_GIB = 80.0
"""Memory of a GPU where nobody says it."""
NODE = 8
"""GPUs of a node, where there are more than these."""
ENOUGH_TO_SHARE = 200
"""Records of a set from which a share is set aside for validation."""
MAX_SKIPPED: float = PromptDataConfig.model_fields["max_skipped"].default
ROLE: dict[Command, str] = {"sft": "actor", "rm": "reward_model", "dpo": "actor", "rl": "actor"}
_RATES: dict[Command, str] = {"sft": "1.0e-5", "rm": "5.0e-6", "dpo": "5.0e-7", "rl": "1.0e-6"}
_TRAINED_BYTES, _SHARED_BYTES, _FROZEN_BYTES = 6, 12, 2
"""Of a parameter in bf16: weight and fp32 gradient; master weight and Adam's moments, shared over data-parallel ranks;
a weight that is only read."""
_USABLE = 0.6
"""Of a GPU's memory: the rest is for activations, and in `rl` for the cache of the engine."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the run is for."""

    device: str
    """`cpu` or `gpu`."""
    ranks: int
    gpu_gib: float | None = None
    """None: not known."""


@dataclass
class Draft:
    """A configuration in the making."""

    command: Command
    model: ModelLook
    data: DataLook
    machine: Machine
    run_dir: Path
    tp: int = 1
    pp: int = 1
    undecided: list[str] = field(default_factory=list)

    @property
    def validation_share(self) -> float | None:
        """Of the records, where there are enough of them: about a thousand at most."""
        total = self.data.total
        if total is None or total < ENOUGH_TO_SHARE:
            return None
        return float(f"{min(0.05, 1000 / total):.1g}")

    @property
    def dp(self) -> int:
        return self.machine.ranks // (self.tp * self.pp)


def choose_layout(draft: Draft) -> None:
    """The least tensor parallelism, then pipeline stages, at which weights, gradients and optimizer states fit."""
    gib = draft.machine.gpu_gib or GPU_GIB
    if draft.machine.device == "cpu":
        return
    fits = [
        (tp, pp)
        for tp in (1, 2, 4, 8)
        for pp in _powers(draft.machine.ranks // tp)
        if draft.machine.ranks % (tp * pp) == 0 and _is_legal(draft.model, tp, pp, draft.machine.ranks)
    ]
    fits.sort(key=lambda layout: (layout[0] * layout[1], layout[1]))
    for tp, pp in fits:
        dp = draft.machine.ranks // (tp * pp)
        if _gib_of_states(draft.command, draft.model.parameters, tp * pp, dp) <= _USABLE * gib:
            draft.tp, draft.pp = tp, pp
            break
    else:
        draft.tp, draft.pp = min(fits, key=lambda layout: (-layout[0] * layout[1], layout[1]), default=(1, 1))
        needed = _gib_of_states(draft.command, draft.model.parameters, draft.tp * draft.pp, draft.dp)
        draft.undecided.append(
            f"weights, gradients and optimizer states take about {needed:.0f} GiB on each of {draft.machine.ranks} "
            f"GPUs, of {gib:g}: give more of them (--nproc), or let roles offload ({ROLE[draft.command]}.offload, "
            "docs/memory.md)"
        )
    if draft.machine.gpu_gib is None:
        draft.undecided.append(f"the memory of a GPU: {gib:g} GiB are taken; --gpu-memory-gib says another")


def _powers(limit: int) -> list[int]:
    return [2**n for n in range(int(math.log2(limit)) + 1)] if limit else []


def _is_legal(model: ModelLook, tp: int, pp: int, ranks: int) -> bool:
    parallel = ParallelConfig(tp=tp, pp=pp, sequence_parallel=tp > 1)
    section = RoleConfig.model_validate({"model": {"path": model.path}, "parallel": parallel.model_dump()})
    try:
        check_role("actor", section, ranks)
    except ValueError:
        return False
    return True


def _gib_of_states(command: Command, parameters: int, model_parallel: int, dp: int) -> float:
    each = _TRAINED_BYTES + _SHARED_BYTES / dp
    frozen = {"sft": 0, "rm": 0, "dpo": 1, "rl": 2}[command]  # a reference; and the engine's weights
    return parameters / model_parallel * (each + frozen * _FROZEN_BYTES) / 2**30


@dataclass(frozen=True, kw_only=True)
class TokenLimits:
    """Limits in tokens."""

    prompt: int
    response: int
    dropped: int
    """Of the samples looked at, those that exceed them."""


def choose_lengths(draft: Draft) -> TokenLimits:
    """As long as the longest sample that was seen, and room to grow; within the model's positions."""
    data, most = draft.data, draft.model.arch.longest_sequence
    if draft.command == "rl":
        response = min(1024, max(1, most // 2))
        draft.undecided.append(
            f"rollout.max_response_tokens: the data has no responses; {response} is a guess within the model's {most} "
            "tokens"
        )
    else:
        response = _rounded_up(max(data.responses))
    prompt = _rounded_up(max(data.prompts))
    if prompt + response > most:
        response = min(response, max(_rounded_up(quantile(data.responses, 0.95)) if data.responses else 1, most // 2))
        response = min(response, most - 1)
        prompt = most - response
    dropped = sum(p > prompt or r > response for p, r in _pairs(data))
    if dropped:
        cut = (
            ", and data.over_long = cut the beginning of responses that are too long" if draft.command == "sft" else ""
        )
        draft.undecided.append(
            f"{dropped} of the {data.records} records looked at are longer than the model's {most} tokens allow: they "
            f"are skipped and counted; a model with more positions would keep them{cut}"
        )
    return TokenLimits(prompt=prompt, response=response, dropped=dropped)


def _pairs(data: DataLook) -> list[tuple[int, int]]:
    return list(zip(data.prompts, data.responses or (0,) * len(data.prompts), strict=True))


def _rounded_up(tokens: int) -> int:
    """A quarter more, in steps that look like a limit."""
    wanted = max(tokens + 1, math.ceil(tokens * 1.25))
    step = 8 if wanted <= 64 else 64 if wanted <= 1024 else 256
    return math.ceil(wanted / step) * step


def batch_of(draft: Draft, lengths: TokenLimits) -> dict[str, int]:
    """Section `train`: packed micro-batches that hold the longest sample, and no batch larger than the data."""
    sequence = lengths.prompt + lengths.response
    longest = 2 * sequence if draft.command in ("rm", "dpo") else sequence
    least = 8192 if draft.machine.device == "gpu" else 2048
    micro = 2 ** math.ceil(math.log2(max(longest, least)))
    total = draft.data.total
    if total is not None and draft.validation_share is not None:
        total = int(total * (1 - draft.validation_share))
    wanted = 128 if draft.command in ("sft", "rl") else 64
    # Ten batches of a pass at least, where the data has so many records.
    batch = wanted if total is None else min(wanted, max(1, total // 10, min(total, draft.dp)))
    if batch > draft.dp:
        batch -= batch % draft.dp
    elif total is not None and batch < draft.dp:
        draft.undecided.append(
            f"the data has {total} records for {draft.dp} data-parallel ranks: some of them have nothing to do"
        )
    if draft.command == "rl":
        samples = 8
        steps = 500 if total is None else max(1, math.ceil(total / batch))
        numbers = {"num_steps": steps, "prompts_per_step": batch, "mini_batch_samples": batch * samples // 2 or 1}
        if batch * samples % numbers["mini_batch_samples"]:
            numbers["mini_batch_samples"] = batch * samples
    else:
        passes = 3 if draft.command == "sft" else 1
        steps = 1000 if total is None else max(1, math.ceil(passes * total / batch))
        numbers = {"num_steps": steps, "mini_batch_samples": batch}
    if total is None:
        draft.undecided.append(f"train.num_steps: how many records there are was not counted; {steps} is a guess")
    return {**numbers, "max_tokens_per_micro_batch": micro}


# --- as a file ------------------------------------------------------------------------------------


def text_of(draft: Draft, *, rewards: list[dict[str, Any]], engine: str, reward_model: Path | None) -> str:
    """The configuration, with what was seen as remarks."""
    lengths = choose_lengths(draft)
    batch = batch_of(draft, lengths)
    model, command = draft.model, draft.command
    warm = max(1, min(50, batch["num_steps"] // 10))
    optim = f"{{lr: {_RATES[command]}, schedule: cosine, warmup_steps: {warm}}}"
    if command == "rl":
        optim = f"{{lr: {_RATES[command]}, warmup_steps: {warm}}}"
    lines = [
        f"run: {{dir: {_yaml(draft.run_dir)}, {_ranks(draft.machine)}}}",
        "",
        *_remark(_model_in_words(model)),
        *_role(ROLE[command], model, draft, optim),
    ]
    if reward_model is not None:
        lines += ["", "# Read, never trained: its scores are the reward.", *_role_of(reward_model, draft)]
    lines += ["", *_data_lines(draft, lengths), "", *_train_lines(draft, batch)]
    if command == "rl":
        samples = f"num_samples_per_prompt: 8, max_response_tokens: {lengths.response}"
        tp = f", parallel: {{tp: {draft.tp}}}" if engine == "vllm" else ""
        lines += [
            "",
            f"rewards: {_yaml(rewards)}",
            f"rollout: {{engine: {engine}, {samples}{tp}}}",
            "# GRPO: the samples of a prompt are compared with each other; no critic.",
            "algo: {advantage: group_relative, kl: {coef: 0.001, placement: loss, estimator: k3}}",
        ]
    lines += ["", f"checkpoint: {{every_minutes: 15, export_every: {max(1, batch['num_steps'] // 4)}, export_keep: 2}}"]
    return "\n".join([*_head(draft), *lines]) + "\n"


def _ranks(machine: Machine) -> str:
    """Those of a node, and of the whole job where it has several nodes."""
    if machine.ranks <= NODE:
        return f"nproc: {machine.ranks}"
    return f"nproc: {NODE}, world_size: {machine.ranks}"


def _head(draft: Draft) -> list[str]:
    lines = [
        f"# Made by megarlhf init for `megarlhf {draft.command}`. Check it: megarlhf {draft.command} -c THIS --dry-run",
        f"# What each key means: megarlhf keys {draft.command}",
    ]
    if draft.undecided:
        lines += ["#", "# Not decided by what was seen:"]
        lines += [line for sentence in draft.undecided for line in _remark(f"- {sentence}")]
    return [*lines, ""]


def _model_in_words(model: ModelLook) -> str:
    arch: Architecture = model.arch
    chat = "a chat template" if model.chat else "no chat template"
    experts = f", {arch.num_experts} experts" if arch.num_experts else ""
    ends = ", ".join(map(str, model.ends))
    return (
        f"{arch.model_type}, {_count(model.parameters)} parameters{experts}, {model.dtype_in_words}; sequences up to "
        f"{arch.longest_sequence} tokens; tokenizer of {model.tokens} tokens with {chat}; a response ends at {ends}"
    )


def _count(number: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)


def _role(role: str, model: ModelLook, draft: Draft, optim: str) -> list[str]:
    stored = "" if model.stored else ", random_init: true"
    lines = [f"{role}:", f"  model: {{path: {_yaml(model.path)}, dtype: {model.dtype}{stored}}}"]
    return [*lines, f"  parallel: {_parallel(draft)}", f"  optim: {optim}"]


def _role_of(path: Path, draft: Draft) -> list[str]:
    return ["reward_model:", f"  model: {{path: {_yaml(path)}}}", f"  parallel: {_parallel(draft)}"]


def _parallel(draft: Draft) -> str:
    sequence = ", sequence_parallel: true" if draft.tp > 1 else ""
    return f"{{tp: {draft.tp}, pp: {draft.pp}{sequence}}}"


def _data_lines(draft: Draft, lengths: TokenLimits) -> list[str]:
    data = draft.data
    _say_how_it_is_written(draft)
    if data.total is None:
        looked_at = f"the first {data.records} records"
    else:
        looked_at = (
            f"all {data.total} records"
            if data.total <= data.records
            else f"the first {data.records} of {data.total} records"
        )
    seen = f"prompts of {_spread(data.prompts)} tokens"
    if data.responses:
        seen += f", responses of {_spread(data.responses)}"
    skipped = "".join(f"; {count} skipped: {why}" for why, count in data.skipped.items())
    lines = [*_remark(f"{data.read}; {looked_at}: {seen}{skipped}"), "data:"]
    lines.append(f"  train: {_yaml(data.source.short())}")
    if data.template == "chat":
        lines.append("  template: chat # each prompt as a message of the user; the lengths are with it")
    if data.several_answers:
        lines.append(f"  loss_on: {data.loss_on}")
    if draft.validation_share is not None:
        lines.append(f"  validation_share: {draft.validation_share} # set aside, for eval_ figures")
    if (skipped_share := (sum(data.skipped.values()) + lengths.dropped) / data.records) > MAX_SKIPPED:
        draft.undecided.append(
            f"data.max_skipped: {100 * skipped_share:.0f} % of the records looked at cannot be used, and as many are "
            "allowed here"
        )
        lines.append(f"  max_skipped: {min(1.0, math.ceil(110 * skipped_share) / 100)}")
    lines.append(f"  max_prompt_tokens: {lengths.prompt} # longer ones are skipped and counted")
    if draft.command != "rl":
        lines.append(f"  max_response_tokens: {lengths.response}")
    return lines


def _say_how_it_is_written(draft: Draft) -> None:
    data = draft.data
    if data.template == "chat":
        draft.undecided.append(
            "data.template: the tokenizer has a chat template, and the texts are written with it, each prompt as a "
            "message of the user; data.template = plain would write them as they stand"
        )
    if data.template_refuses:
        draft.undecided.append(
            f"data.template: the texts are written as they stand, as the chat template refuses them: "
            f"{data.template_refuses}"
        )
    if data.several_answers and data.loss_on == "last":
        draft.undecided.append(
            f"data.loss_on: {data.several_answers} of {data.records} conversations have several answers, of which "
            "last learns the last one, and all each one"
        )


def _spread(values: tuple[int, ...]) -> str:
    """`4 to 60 (half of them up to 22)`"""
    if len(set(values)) == 1:
        return str(values[0])
    return f"{min(values)} to {max(values)} (half of them up to {quantile(values, 0.5)})"


def _train_lines(draft: Draft, batch: dict[str, int]) -> list[str]:
    remarks = {
        "num_steps": "rollout-and-train steps: each prompt once" if draft.command == "rl" else "optimizer steps",
        "prompts_per_step": "over all ranks",
        "mini_batch_samples": "samples of an optimizer step, over all ranks",
        "max_tokens_per_micro_batch": "tokens of one forward on one rank: less of it needs less memory",
    }
    return ["train:", *(f"  {key}: {value} # {remarks[key]}" for key, value in batch.items())]


def _remark(text: str) -> list[str]:
    return textwrap.wrap(text, 110, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def _yaml(value: object) -> str:
    """In one line; a text in quotes where YAML would read it as something else."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_yaml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_yaml, value)) + "]"
    text = str(value)
    return text if re.fullmatch(r"[A-Za-z_./][\w./-]*", text) and text.lower() not in _WORDS else json.dumps(text)


_WORDS = ("true", "false", "null", "yes", "no", "on", "off")
