"""The configuration that `megarlhf init` writes for a model and data.

Open decisions are collected as sentences. They are printed, and written at the beginning of the file.
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

from megarlhf.config import ParallelConfig, PromptDataConfig, RoleConfig
from megarlhf.config.lora import FULL_RATES
from megarlhf.planning.init.inspection import Command, DataLook, ModelLook, quantile
from megarlhf.planning.layout import check_role
from megarlhf.rollout.engines import ENGINES

GPU_GIB = 80.0
"""Assumed memory of a GPU."""
NODE = 8
"""GPUs of a node, for more ranks than these."""
ENOUGH_TO_SHARE = 200
"""Fewest records of a set from which a share is set aside for validation."""
MAX_SKIPPED: float = PromptDataConfig.model_fields["max_skipped"].default
ROLE: dict[Command, str] = {"sft": "actor", "rm": "reward_model", "dpo": "actor", "rl": "actor"}
_TRAINED_BYTES, _SHARED_BYTES, _FROZEN_BYTES = 6, 12, 2
"""Bytes of a parameter in bf16: weight and fp32 gradient; master weight and Adam's moments, which are sharded over
data-parallel ranks; a frozen weight."""
_USABLE = 0.6
"""Share of a GPU's memory for these. The rest is for activations, and in `rl` for the cache of the engine."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The hardware of the run."""

    device: str
    """`cpu` or `gpu`."""
    ranks: int
    gpu_gib: float | None = None
    """Memory of a GPU, if known."""


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
    """Sentences on open decisions."""

    @property
    def validation_share(self) -> float | None:
        """Share of the records for validation: at most about a thousand. None for few records."""
        total = self.data.total
        if total is None or total < ENOUGH_TO_SHARE:
            return None
        return float(f"{min(0.05, 1000 / total):.1g}")

    @property
    def dp(self) -> int:
        """Data-parallel size."""
        return self.machine.ranks // (self.tp * self.pp)


def choose_layout(draft: Draft) -> None:
    """Set the least tensor parallelism, then pipeline stages, with which weights, gradients and optimizer states
    fit."""
    machine, gib = draft.machine, draft.machine.gpu_gib or GPU_GIB
    if machine.device == "cpu":
        return
    legal = [
        (tp, pp)
        for tp in (1, 2, 4, 8)
        for pp in (2**n for n in range((machine.ranks // tp).bit_length()))
        if machine.ranks % (tp * pp) == 0 and _is_legal(draft.model, tp, pp, machine.ranks)
    ]
    for tp, pp in sorted(legal, key=lambda layout: (layout[0] * layout[1], layout[1])):
        draft.tp, draft.pp = tp, pp
        if _gib_of_states(draft) <= _USABLE * gib:
            break
    else:
        draft.tp, draft.pp = min(legal, key=lambda layout: (-layout[0] * layout[1], layout[1]), default=(1, 1))
        draft.undecided.append(
            f"weights, gradients and optimizer states take about {_gib_of_states(draft):.0f} GiB on each of "
            f"{machine.ranks} GPUs, of {gib:g}: give more of them (--nproc), or let roles offload "
            f"({ROLE[draft.command]}.offload, docs/memory.md)"
        )
    if machine.gpu_gib is None:
        draft.undecided.append(f"the memory of a GPU: {gib:g} GiB are taken; --gpu-memory-gib says another")


def _is_legal(model: ModelLook, tp: int, pp: int, ranks: int) -> bool:
    parallel = ParallelConfig(tp=tp, pp=pp, sequence_parallel=tp > 1)
    section = RoleConfig.model_validate({"model": {"path": model.path}, "parallel": parallel.model_dump()})
    try:
        check_role("actor", section, ranks)
    except ValueError:
        return False
    return True


def _gib_of_states(draft: Draft) -> float:
    """GiB of weights, gradients and optimizer states on a rank."""
    num_frozen = {"sft": 0, "rm": 0, "dpo": 1, "rl": 2}[draft.command]  # a reference; and the engine's weights
    bytes_per_parameter = _TRAINED_BYTES + _SHARED_BYTES / draft.dp + num_frozen * _FROZEN_BYTES
    return draft.model.parameters / (draft.tp * draft.pp) * bytes_per_parameter / 2**30


@dataclass(frozen=True, kw_only=True)
class TokenLimits:
    """Limits in tokens."""

    prompt: int
    response: int
    dropped: int
    """Number of the inspected samples that exceed the limits."""


def choose_lengths(draft: Draft) -> TokenLimits:
    """Limits for the longest inspected sample, with room to grow, within the model's positions."""
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
    lengths = zip(data.prompts, data.responses or (0,) * len(data.prompts), strict=True)
    dropped = sum(prompt_length > prompt or length > response for prompt_length, length in lengths)
    if dropped:
        is_sft = draft.command == "sft"
        cut = ", and data.over_long = cut the beginning of responses that are too long" * is_sft
        draft.undecided.append(
            f"{dropped} of the {data.records} records looked at are longer than the model's {most} tokens allow: they "
            f"are skipped and counted; a model with more positions would keep them{cut}"
        )
    return TokenLimits(prompt=prompt, response=response, dropped=dropped)


def _rounded_up(tokens: int) -> int:
    """A quarter more, rounded up to a multiple of 8, 64 or 256."""
    wanted = max(tokens + 1, math.ceil(tokens * 1.25))
    step = 8 if wanted <= 64 else 64 if wanted <= 1024 else 256
    return math.ceil(wanted / step) * step


def batch_of(draft: Draft, lengths: TokenLimits) -> dict[str, int]:
    """Section `train`: micro-batches that hold the longest sample, and no batch larger than the data."""
    sequence = lengths.prompt + lengths.response
    longest = 2 * sequence if draft.command in ("rm", "dpo") else sequence
    least = 8192 if draft.machine.device == "gpu" else 2048
    total = draft.data.total
    if total is not None and draft.validation_share is not None:
        total = int(total * (1 - draft.validation_share))
    wanted = 128 if draft.command in ("sft", "rl") else 64
    # At least ten batches of a pass, if the data has so many records.
    batch = wanted if total is None else min(wanted, max(1, total // 10, min(total, draft.dp)))
    if batch > draft.dp:
        batch -= batch % draft.dp
    elif total is not None and batch < draft.dp:
        draft.undecided.append(
            f"the data has {total} records for {draft.dp} data-parallel ranks: some of them have nothing to do"
        )
    passes, guess = (3 if draft.command == "sft" else 1), (500 if draft.command == "rl" else 1000)
    steps = guess if total is None else max(1, math.ceil(passes * total / batch))
    train = {"num_steps": steps}
    if draft.command == "rl":
        train |= {"prompts_per_step": batch, "mini_batch_samples": 8 * batch // 2}  # of 8 samples per prompt
    else:
        train["mini_batch_samples"] = batch
    if total is None:
        draft.undecided.append(f"train.num_steps: how many records there are was not counted; {steps} is a guess")
    return {**train, "max_tokens_per_micro_batch": 2 ** math.ceil(math.log2(max(longest, least)))}


# --- as a file ------------------------------------------------------------------------------------


def config_text(draft: Draft, *, rewards: list[dict[str, Any]], engine: str, reward_model: Path | None) -> str:
    """The configuration, with remarks on the model and the data."""
    lengths = choose_lengths(draft)
    batch = batch_of(draft, lengths)
    model, command, ranks = draft.model, draft.command, draft.machine.ranks
    rate = f"{FULL_RATES[command]:.1e}".replace("e-0", "e-")
    schedule = "" if command == "rl" else "schedule: cosine, "
    parallel = f"  parallel: {{tp: {draft.tp}, pp: {draft.pp}{', sequence_parallel: true' * (draft.tp > 1)}}}"
    further = ", random_init: true" * (not model.stored)
    further += f", families: {_yaml(model.families)}" * bool(model.families)
    job = f"nproc: {ranks}" if ranks <= NODE else f"nproc: {NODE}, world_size: {ranks}"
    lines = [
        f"run: {{dir: {_yaml(draft.run_dir)}, {job}}}",
        "",
        *_remark(_describe_model(model)),
        f"{ROLE[command]}:",
        f"  model: {{path: {_yaml(model.path)}, dtype: {model.dtype}{further}}}",
        parallel,
        f"  optim: {{lr: {rate}, {schedule}warmup_steps: {max(1, min(50, batch['num_steps'] // 10))}}}",
    ]
    if reward_model is not None:
        lines += ["", "# Read, never trained: its scores are the reward.", "reward_model:"]
        lines += [f"  model: {{path: {_yaml(reward_model)}}}", parallel]
    lines += ["", *_data_lines(draft, lengths), "", "train:"]
    lines += [f"  {key}: {value} # {_TRAIN_REMARKS.get((command, key), _TRAIN_REMARKS['', key])}"
              for key, value in batch.items()]  # fmt: skip
    if command == "rl":
        samples = f"num_samples_per_prompt: 8, max_response_tokens: {lengths.response}"
        tp = f", parallel: {{tp: {draft.tp}}}" if ENGINES[engine].has_own_weights else ""
        lines += [
            "",
            f"rewards: {_yaml(rewards)}",
            f"rollout: {{engine: {engine}, {samples}{tp}}}",
            "# GRPO: the samples of a prompt are compared with each other; no critic.",
            "algo: {advantage: group_relative, kl: {coef: 0.001, placement: loss, estimator: k3}}",
        ]
    lines += ["", f"checkpoint: {{every_minutes: 15, export_every: {max(1, batch['num_steps'] // 4)}, export_keep: 2}}"]
    head = [
        f"# Made by megarlhf init for `megarlhf {command}`. Check it: megarlhf {command} -c THIS --dry-run",
        f"# What each key means: megarlhf keys {command}",
    ]
    if draft.undecided:
        head += ["#", "# Not decided by what was seen:"]
        head += [line for sentence in draft.undecided for line in _remark(f"- {sentence}")]
    return "\n".join([*head, "", *lines]) + "\n"


_TRAIN_REMARKS = {
    ("rl", "num_steps"): "rollout-and-train steps: each prompt once",
    ("", "num_steps"): "optimizer steps",
    ("", "prompts_per_step"): "over all ranks",
    ("", "mini_batch_samples"): "samples of an optimizer step, over all ranks",
    ("", "max_tokens_per_micro_batch"): "tokens of one forward on one rank: less of it needs less memory",
}


def _describe_model(model: ModelLook) -> str:
    arch, parameters = model.arch, str(model.parameters)
    for size, unit in ((10**3, "K"), (10**6, "M"), (10**9, "B")):
        if model.parameters >= size:
            parameters = f"{model.parameters / size:.1f}{unit}"
    experts = f", {arch.num_experts} experts" if arch.num_experts else ""
    return (
        f"{arch.model_type}, {parameters} parameters{experts}, {model.dtype_in_words}; sequences up to "
        f"{arch.longest_sequence} tokens; tokenizer of {model.tokens} tokens with {'a' if model.chat else 'no'} chat "
        f"template; a response ends at {', '.join(map(str, model.ends))}"
    )


def _data_lines(draft: Draft, lengths: TokenLimits) -> list[str]:
    """Section `data`, with a remark on the inspected records."""
    data = draft.data
    _add_notes_on_writing(draft)
    first, of_all = f"the first {data.records}", "" if data.total is None else f" of {data.total}"
    is_whole = data.total is not None and data.total <= data.records
    inspected = f"all {data.total} records" if is_whole else f"{first}{of_all} records"
    lengths_seen = f"prompts of {_spread(data.prompts)} tokens"
    if data.responses:
        lengths_seen += f", responses of {_spread(data.responses)}"
    skipped = "".join(f"; {count} skipped: {reason}" for reason, count in data.skipped.items())
    lines = [*_remark(f"{data.read}; {inspected}: {lengths_seen}{skipped}"), "data:"]
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


def _add_notes_on_writing(draft: Draft) -> None:
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


def _remark(text: str) -> list[str]:
    return textwrap.wrap(text, 110, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def _yaml(value: object) -> str:
    """YAML in one line. A text is quoted where YAML would read it as another value."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_yaml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_yaml, value)) + "]"
    text = str(value)
    return text if re.fullmatch(r"[A-Za-z_./][\w./-]*", text) and text.lower() not in _WORDS else json.dumps(text)


_WORDS = ("true", "false", "null", "yes", "no", "on", "off")
