"""Stand-ins for files that a rehearsal does not have: tokenizer, data and rewards.

They are real files in a temporary directory, which the program reads as any others. Files that exist are used as they
are. The page names every stand-in.
"""

from __future__ import annotations

import contextlib
import json
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarlhf.architectures.hf_config import read_config
from megarlhf.config import (
    ROLES,
    DPOConfig,
    DynamicSamplingConfig,
    RewardConfig,
    RLConfig,
    RMConfig,
    RoleConfig,
    SFTConfig,
    describe_sources,
)
from megarlhf.data.sources.find import is_there
from megarlhf.own_code.load import is_path
from megarlhf.rehearsal.fakes.lengths import Constant, Lengths, LogNormal
from megarlhf.rollout.environments.answer import Answer, Turn
from megarlhf.rollout.slices import SliceRule
from megarlhf.weights.checkpoint.dtype import resolve_dtype

SPECIAL = ("<pad>", "<s>", "</s>")
LETTERS = string.ascii_letters
"""Tokens of the stand-in tokenizer, in order."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
REWARD = "megarlhf.rehearsal.fakes.inputs:length_of_response"
ENVIRONMENT = "megarlhf.rehearsal.fakes.inputs:NoEnvironment"

AnyConfig = SFTConfig | RMConfig | DPOConfig | RLConfig


@dataclass(frozen=True, kw_only=True)
class StandIns:
    """A configuration that runs without the missing files, and notes about its stand-ins."""

    cfg: AnyConfig
    notes: tuple[str, ...]
    """Sentences for the page."""
    originals: Mapping[str, str]
    """User's directory by directory of the model that stands in for it."""

    @contextlib.contextmanager
    def naming_users_directories(self) -> Iterator[None]:
        """Scope in which refusals name the user's directories in place of stand-ins. Raises: ValueError."""
        try:
            yield
        except ValueError as error:
            message = str(error)
            for stand_in_directory, original in self.originals.items():
                message = message.replace(stand_in_directory, original)
            raise ValueError(message) from error


def length_of_response(prompt: str, response: str, fields: Mapping[str, Any]) -> float:
    """Reward that differs between samples."""
    return float(len(response) % 7)


def every_group(drawn: Any, rewards: Sequence[RewardConfig], cfg: DynamicSamplingConfig) -> list[int]:
    """Groups that dynamic sampling keeps: all, because rewards have no meaning here."""
    return list(range(len(drawn.prompts)))


class NoEnvironment:
    """An environment that is never asked: the engine of a rehearsal makes its answers."""

    def reset(self, fields: Mapping[str, Any], seed: int) -> None:
        raise AssertionError("a rehearsal asks no environment")

    def step(self, turn: Turn) -> Answer:
        raise AssertionError("a rehearsal asks no environment")


def stand_in(
    cfg: AnyConfig,
    directory: Path,
    *,
    prompt_lengths: Lengths | None,
    response_lengths: Lengths | None,
    steps: int,
    resume_point: bool = False,
) -> StandIns:
    """Configuration with stand-ins in `directory` for missing files.

    resume_point: whether a resume point is written at the beginning of the last step, if there are several steps and
    the job writes any.
    """
    tree, notes = cfg.model_dump(mode="json"), []
    tree["run"] |= {"dir": str(directory / "run"), "on_existing": "overwrite", "wandb": {}}
    resume_point = resume_point and steps > 1 and cfg.checkpoint.by_cadence
    tree["checkpoint"] = {"every_minutes": 0, "every": steps - 1 if resume_point else 0}
    tree["profile"] = {}
    notes.append(
        f"One resume point is written, before step {steps}." if resume_point else "No resume point is written."
    )
    notes.append("No export is written.")
    if isinstance(cfg, RLConfig) and 0 < cfg.train.critic_warmup_steps < cfg.train.num_steps:
        tree["train"]["critic_warmup_steps"] = (
            0  # else no step would have the actor's training and its optimizer's state
        )
        notes.append(
            f"The first {cfg.train.critic_warmup_steps} steps train the critic alone (train.critic_warmup_steps): "
            "the rehearsed steps are those after them."
        )
    paths: dict[str, str] = {}
    # Responses are data, except in `rl`.
    given = prompt_lengths is not None or (response_lengths is not None and not isinstance(cfg, RLConfig))
    exists = is_there(cfg.data.train)
    has_data = exists and not given
    for role in ROLES:
        if tree.get(role) is not None:
            notes += _model(role, tree[role]["model"], getattr(cfg, role), directory, paths, has_data=has_data)
    if paths and isinstance(cfg, RLConfig):
        tree["rollout"] |= {"stop": [], "stop_token_ids": []}
    if paths or not has_data:
        why = "is not there" if not exists else "is not used, since lengths were given" if given else ""
        notes += _data(cfg, tree["data"], directory, steps, prompt_lengths, response_lengths, why)
    elif isinstance(cfg, RLConfig):  # its evaluations read rewards, which a device without numbers does not know
        tree["data"] |= dict.fromkeys(("validation", "test", "validation_share"))
        notes += _held_out(cfg)
    tree["observe"] = {}
    if isinstance(cfg, RLConfig):
        notes += _own_code(cfg, tree)
        tree["samples"] = {"every": 0}
        notes += _rewards(cfg.rewards, tree)
        if cfg.algo.dynamic_sampling.is_on:
            notes.append(
                f"Dynamic sampling is taken to find signal in every group: of {cfg.prompts_drawn} prompts drawn in a "
                f"step the first {cfg.train.prompts_per_step} are trained on, and no others are drawn in their place."
            )
        if cfg.ptx is not None and (paths or not is_there(cfg.ptx.data)):
            tree["ptx"] = None
            why = "cannot be read with the stand-in tokenizer" if is_there(cfg.ptx.data) else "is not there"
            notes.append(f"ptx.data = {describe_sources(cfg.ptx.data)} {why}: the pretraining mix is left out.")
    originals = {stand_in: original for original, stand_in in paths.items()}
    return StandIns(cfg=type(cfg).model_validate(tree), notes=tuple(dict.fromkeys(notes)), originals=originals)


def _own_code(cfg: RLConfig, tree: dict[str, Any]) -> list[str]:
    """Put built-in code in place of the user's, which could not compute on a device without numbers. Returns notes."""
    algo, notes = tree["algo"], []
    traits = cfg.algo.traits
    by_column = {"values": "gae", "greedy_rewards": "remax"}
    grouped = "group_relative" if traits.compares_groups else "reinforce"
    stand_ins: list[tuple[str, dict[str, Any], str, Any]] = [
        ("algo.advantage", algo, "advantage", next((by_column[c] for c in traits.reads if c in by_column), grouped)),
        ("algo.policy_loss", algo, "policy_loss", "clip"),
        ("algo.ratio", algo, "ratio", "token"),
        ("algo.token_weights", algo, "token_weights", None),
        ("algo.kl.estimator", algo["kl"], "estimator", "k3"),
        ("train.sampler", tree["train"], "sampler", None),
    ]
    if is_path(cfg.algo.advantage) and cfg.needs_reference:
        algo["kl"]["log"] = True  # what is read stays there
    for key, section, name, stand_in in stand_ins:
        if section[name] is not None and is_path(section[name]):
            notes.append(
                f"{key} = {section[name]} is not rehearsed: {stand_in or 'the built-in code'} takes its place."
            )
            section[name] = stand_in
    if cfg.environment is not None:
        notes.append(
            f"environment.function = {cfg.environment.function} is not started: its time and memory are not included."
            if cfg.environment.function
            else "environment.tools are not started: their time and memory are not included, nor their descriptions."
        )
        own = ("tools", "parser", "max_result_characters", "interface", "python")
        kept = {key: value for key, value in tree["environment"].items() if key not in own}
        tree["environment"] = kept | {"function": ENVIRONMENT, "args": {}}
    return notes


def _model(
    role: str, model: dict[str, Any], section: RoleConfig, directory: Path, paths: dict[str, str], *, has_data: bool
) -> list[str]:
    """Point a role at a directory with config.json and tokenizer, and set its dtype, which the weights may have
    decided. Returns notes.

    The lengths of stand-in records are counted by the stand-in tokenizer, so it replaces an existing one wherever
    records stand in.

    Raises: ValueError where there is no config.json.
    """
    source = section.model.hf_directory()
    tokenizer = section.model.tokenizer_place()
    has_tokenizer = tokenizer.is_file() or any((tokenizer / name).is_file() for name in TOKENIZER_FILES)
    if has_tokenizer and has_data:
        return []
    if str(source) not in paths:
        folder = directory / "models" / f"{len(paths)}_{source.name}"
        folder.mkdir(parents=True)
        config = {**read_config(source), "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
        (folder / "config.json").write_text(json.dumps(config, indent=1))
        write_tokenizer(folder)
        paths[str(source)] = str(folder)
    head = ROLES[role].head
    dtype = resolve_dtype(role, section.model, head).name
    model |= {"path": paths[str(source)], "hf": None, "tokenizer": None, "dtype": dtype}
    why = "is not used, since the data stands in" if has_tokenizer else "is not there"
    return [f"The tokenizer of {tokenizer} {why}: one of {len(LETTERS)} letters stands in."]


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with one token for each letter. A text begins with bos.

    transformers builds a tokenizer of its own for some families (Qwen2) from the vocabulary of any tokenizer. It is one
    of byte pairs. So is this one, without any pair, so that both agree.
    """
    pad, bos, eos = SPECIAL
    spread = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": spread,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {bos: {"id": bos, "ids": [SPECIAL.index(bos)], "tokens": [bos]}},
        },
        "decoder": spread,
        "model": {"type": "BPE", "vocab": {name: n for n, name in enumerate((*SPECIAL, *LETTERS))}, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos, "pad_token": pad}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def _data(
    cfg: AnyConfig,
    data: dict[str, Any],
    directory: Path,
    steps: int,
    prompts: Lengths | None,
    responses: Lengths | None,
    why: str,
) -> list[str]:
    """Write records of given lengths. Returns notes.

    why: why the data are not used; empty if because of the tokenizer.
    """
    longest = cfg.data.max_prompt_tokens
    prompts = prompts or Constant(max(1, longest // 2))
    per_step = cfg.prompts_drawn if isinstance(cfg, RLConfig) else cfg.train.mini_batch_samples
    if isinstance(cfg, RLConfig):
        steps += SliceRule.of(cfg.rollout).lag  # the last step begins samples of those after it
    file = directory / "data.jsonl"
    lengths = [f"prompts: {prompts.describe()}, at most {longest}"]
    most = None if isinstance(cfg, RLConfig) else cfg.data.max_response_tokens
    if most is not None:
        responses = responses or LogNormal(max(2.0, most / 3), 0.6)
        lengths.append(f"responses: {responses.describe()}, at most {most}")
    with file.open("w", encoding="utf-8") as out:
        for n in range(per_step * steps):
            # One token of the prompt is its beginning.
            record: dict[str, Any] = {"prompt": _text(min(prompts.draw(3 * n), longest) - 1, n)}
            if most is not None and responses is not None:
                names = ("response",) if isinstance(cfg, SFTConfig) else ("chosen", "rejected")
                for k, name in enumerate(names, 1):
                    # One token of the response is its end.
                    record[name] = _text(min(responses.draw(3 * n + k), most) - 1, n + k)
            out.write(json.dumps(record) + "\n")
    data |= {"train": str(file), "template": "plain", "chat_template": None, "template_args": {}}
    data |= {"sequence_length": None} if isinstance(cfg, SFTConfig) else {}
    data |= dict.fromkeys(("validation", "test", "validation_share", "phases", "workers"))
    data |= {"split_seed": 0, "cache": "none"}
    why = why or "cannot be read with the stand-in tokenizer"
    train = describe_sources(cfg.data.train)
    notes = [f"data.train = {train} {why}: {per_step * steps} records stand in; {'; '.join(lengths)}."]
    return [*notes, *_held_out(cfg)]


def _held_out(cfg: AnyConfig) -> list[str]:
    """Note that held-out samples are left out, if the job has any."""
    if not cfg.data.has_validation:
        return []
    held_out = cfg.data.validation
    what = f"data.validation = {describe_sources(held_out)}" if held_out else "data.validation_share"
    return [f"{what} is left out: memory and time of evaluations are not included."]


def _text(tokens: int, number: int) -> str:
    """Text of so many letters. It begins with the number in letters: equal prompts would be computed once."""
    digits, rest = "", number
    while rest or not digits:
        rest, digit = divmod(rest, len(LETTERS))
        digits += LETTERS[digit]
    return "".join([*digits, *(LETTERS[(number + k) % len(LETTERS)] for k in range(tokens))])[: max(1, tokens)]


def _rewards(rewards: Sequence[RewardConfig], tree: dict[str, Any]) -> list[str]:
    """Replace functions, servers and classifiers, whose answers would have no meaning. Returns notes."""
    notes, kept = [], []
    for reward, given in zip(rewards, tree["rewards"], strict=True):
        if reward.kind == "model" and not reward.retokenize:
            kept.append(given)
            continue
        if reward.kind == "environment":
            kept.append(given)
            notes.append(f"The reward {reward.label} is made up, one number for each turn.")
            continue
        notes.append(f"The reward {reward.label} is not called: its time and memory are not included.")
        scaled = {key: given[key] for key in ("weight", "shift", "clip", "normalise", "normalise_eps")}
        kept.append({"kind": "rule", "rule": REWARD, "name": reward.label, "workers": 0, **scaled})
    tree["rewards"] = kept
    tree["eval"] |= {"accuracy": None}
    return notes
