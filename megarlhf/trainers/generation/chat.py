"""`megarlhf generate` at a terminal: prints responses to typed prompts, one after the other. No file is written."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from megarlhf.collective_errors import from_first_rank
from megarlhf.config.ask import AskConfig
from megarlhf.data.sample_types import sample_of
from megarlhf.data.samples.encoders import PromptSample, Unusable, describe_reading
from megarlhf.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from megarlhf.planning.data.encoders import prompt_encoder
from megarlhf.rollout.conversations import draw_samples
from megarlhf.rollout.environments.environment import Environment, environment_of
from megarlhf.rollout.factory import sampling_of
from megarlhf.rollout.in_flight import Requests
from megarlhf.rollout.responses import sample_seed
from megarlhf.rollout.rewards.score import response_texts
from megarlhf.rollouts import Dialogue, Rollouts
from megarlhf.runtime import Runtime
from megarlhf.trainers.generation.generate import build_engine

SIGN = "> "
"""Shown at a terminal before a prompt is typed."""


def run(cfg: AskConfig, runtime: Runtime, model: Path) -> None:
    """Print a response to each prompt of the command line, or, without any, to each typed line.

    Raises: ValueError for a prompt of the command line that cannot be used.
    """
    encoder = prompt_encoder(cfg.data, cfg.actor.model.tokenizer_place(), environment=cfg.environment)
    encode_record = encoder.open()

    def encode(text: str) -> PromptSample:
        try:
            sample: PromptSample = sample_of(encode_record(0, record_of(text)))
            return sample
        except Unusable as reason:
            limit = f"; the limit is data.max_prompt_tokens = {cfg.data.max_prompt_tokens}"
            raise ValueError(f"{reason}{limit if 'longer' in str(reason) else ''}") from None

    def record_of(text: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}

    has_tools = cfg.environment is not None and bool(cfg.environment.tools)
    chat = cfg.data.template_mode == "chat" or has_tools
    if runtime.is_main and (read_as := describe_reading(encoder, record_of("x"))):
        print(f"prompts: {read_as}", file=sys.stderr, flush=True)
    prompts = [encode(text) for text in cfg.prompts]  # before a model is built
    tokenizer = load_tokenizer(cfg.actor.model.tokenizer_place())
    sampling = sampling_of(cfg.rollout, cfg.actor, tokenizer, greedy=cfg.greedy, data=cfg.data)
    engine, count, per_prompt = build_engine(cfg, runtime), 0, cfg.rollout.num_samples_per_prompt
    environment = environment_of(cfg, tokenizer, sampling)
    with contextlib.closing(environment) if environment else contextlib.nullcontext():
        for prompt in prompts or typed_prompts(encode, runtime):
            rows = [torch.tensor(prompt.tokens)] * per_prompt
            seeds = [sample_seed(cfg.run.seed, 0, count + n) for n in range(per_prompt)]
            requests, count = Requests.whole(rows, seeds, sampling.max_tokens), count + per_prompt
            rollouts = draw_samples(engine, environment, [prompt] * per_prompt, requests, sampling)
            if runtime.is_main:
                show(cfg, prompt, rollouts, tokenizer, environment)
    engine.close()


def show(
    cfg: AskConfig, prompt: PromptSample, rollouts: Rollouts, tokenizer: Tokenizer, environment: Environment | None
) -> None:
    """Print the responses to a prompt; of a conversation with an environment all turns and answers."""
    for n, text in enumerate(response_texts(rollouts, tokenizer)):
        if environment is not None:
            show_conversation(rollouts.dialogues[n], environment.transcript(prompt, rollouts, n).turns)
            continue
        print(text, flush=True)
        if not rollouts.finished_N[n]:
            cut = f"(cut at rollout.max_response_tokens = {cfg.rollout.max_response_tokens})"
            print(cut, file=sys.stderr, flush=True)


def show_conversation(dialogue: Dialogue, turns: Sequence[str]) -> None:
    """Print the model's turns, and the environment's answers indented under them with the role of each message."""
    for observation, turn in zip_longest(dialogue.observations, turns, fillvalue=""):  # none if `reset` has failed
        messages = [{"content": observation}] if isinstance(observation, str) and observation else observation
        for message in messages:
            role = f"{message['role']}: " if "role" in message else ""
            print(f"    {role}{message['content']}", flush=True)
        print(turn, flush=True)
    reward = ", ".join("-" if reward is None else f"{reward:g}" for reward in dialogue.rewards)
    error = f"; {dialogue.error}" if dialogue.error else ""
    print(f"(ended by {dialogue.ended_by}; rewards {reward}{error})", file=sys.stderr, flush=True)


def typed_prompts(encode: Callable[[str], PromptSample], runtime: Runtime) -> Iterator[PromptSample]:
    """Lines typed at the first rank, on every rank, until the end of input (Ctrl-D). Collective."""
    at_terminal = sys.stdin.isatty()
    if runtime.is_main and at_terminal:
        print("one prompt a line; Ctrl-D ends", file=sys.stderr, flush=True)
    while True:
        line: str | None = None
        if runtime.is_main:
            if at_terminal:
                print(SIGN, end="", file=sys.stderr, flush=True)
            line = sys.stdin.readline() or None
        line = from_first_rank(line)
        if line is None:
            return
        if not line.strip():
            continue
        try:
            yield encode(line.rstrip("\n"))
        except ValueError as reason:
            if runtime.is_main:
                print(f"{reason}", file=sys.stderr, flush=True)
