"""`megarlhf init`: a commented configuration for a model and data that it has looked at, which passes `--dry-run`."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

from megarlhf.config import DataConfig, load_config
from megarlhf.planning.data.rewards import rule_for_answers
from megarlhf.planning.init.configuration import ROLE, Draft, Machine, choose_layout, text_of
from megarlhf.planning.init.inspection import Command, DataLook, ModelLook, look_at_data, look_at_model
from megarlhf.planning.preflight import preflight
from megarlhf.runtime import GPU, capabilities


def init(arguments: argparse.Namespace, configs: Any) -> int:
    """Raises: ValueError for what is not there, does not fit together, or would be overwritten."""
    with _without_options():
        return _write(arguments, configs)


@contextlib.contextmanager
def _without_options() -> Iterator[None]:
    """Adds to a refusal what can be done about keys that it names, of which `init` has no options."""
    try:
        yield
    except ValueError as error:
        if not any(key in DataConfig.model_fields for key in re.findall(r"\bdata\.(\w+)", str(error))):
            raise
        raise ValueError(
            f"{error} (`init` takes no keys of data: change the data, or begin with a file of configs/ and set them)"
        ) from error


def _write(arguments: argparse.Namespace, configs: Any) -> int:
    model = look_at_model(arguments.model)
    data = look_at_data(Path(arguments.data), arguments.split, arguments.for_command, model)
    command = data.command
    out = Path(arguments.out or f"{command}.yaml")
    if out.exists():
        raise ValueError(f"{out} exists, and is not overwritten; name another file with -o")
    _require_head(command, model)
    run_dir = _unused(Path("runs") / command) if arguments.run_dir is None else Path(arguments.run_dir)
    draft = Draft(command, model, data, _machine(arguments), run_dir)
    choose_layout(draft)
    _say_what_is_open(draft, arguments)
    rewards = _rewards(arguments, data, draft.undecided) if command == "rl" else []
    text = _checked(draft, rewards, arguments.reward_model, configs)
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("x", encoding="utf-8") as stream:
        stream.write(text)
    print(f"wrote {out}, for `megarlhf {command}` on {draft.machine.ranks} {draft.machine.device.upper()} rank(s)")
    for sentence in draft.undecided:
        print(f"not decided: {sentence}")
    print(f"next: megarlhf {command} -c {out} --dry-run")
    if draft.machine.device == "gpu":
        print(f"and: megarlhf rehearse {command} -c {out}   (memory and time, without a GPU)")
    return 0


def _unused(run_dir: Path) -> Path:
    """`runs/sft`, or `runs/sft-2` where that is taken."""
    names = (run_dir if number == 1 else run_dir.with_name(f"{run_dir.name}-{number}") for number in count(1))
    return next(each for each in names if not each.exists())


def _machine(arguments: argparse.Namespace) -> Machine:
    here = capabilities()
    device = arguments.device or ("gpu" if here.device_count else "cpu")
    found = here.device_count if device == "gpu" else 0
    if device == "gpu" and not (arguments.nproc or found):
        raise ValueError("--device gpu, and this machine has none to count: say how many with --nproc")
    return Machine(device=device, ranks=arguments.nproc or found or 1, gpu_gib=arguments.gpu_memory_gib)


def _require_head(command: Command, model: ModelLook) -> None:
    if model.head == "scalar" and command != "rm":
        raise ValueError(
            f"{model.path} is a reward model or a critic, and {command} trains a language model; give one, or "
            "--command rm"
        )


def _say_what_is_open(draft: Draft, arguments: argparse.Namespace) -> None:
    if draft.command == "rm" and arguments.for_command is None:
        draft.undecided.append("the command: preference pairs are for rm and for dpo; `--command dpo` writes the other")
    if not draft.model.stored:
        draft.undecided.append(
            f"the weights: {draft.model.path} has none, so {ROLE[draft.command]}.model.random_init = true starts at "
            "random; remove it once they are there"
        )
    if draft.machine.device == "gpu" and draft.model.dtype_in_words.startswith("fp32"):
        draft.undecided.append(
            f"the dtype: the weights are stored in fp32, and auto keeps it; {ROLE[draft.command]}.model.dtype = bf16 "
            "takes a third of the memory and is what GPUs are fast in"
        )
    if draft.model.dtype != "auto":
        draft.undecided.append(f"the dtype: {draft.model.dtype_in_words}; fp32 would keep every digit")


def _rewards(arguments: argparse.Namespace, data: DataLook, undecided: list[str]) -> list[dict[str, Any]]:
    """What scores the responses. Raises: ValueError where nothing says it."""
    if arguments.reward_model is not None:
        return [{"kind": "model"}]
    if arguments.reward is not None:
        return [{"kind": "rule", "rule": arguments.reward}]
    if data.has_answer:
        rule, why = rule_for_answers(data.source, talks=data.template == "chat")
        if why:
            undecided.append(f"rewards: the answers are {why}")
        return [{"kind": "rule", "rule": rule}]
    raise ValueError(
        "rl needs a reward, and the data has no column 'answer' to compare with; give --reward-model DIR (a model that "
        "`megarlhf rm` has trained) or --reward RULE (`megarlhf keys rl.rewards`, docs/data.md)"
    )


def _checked(draft: Draft, rewards: list[dict[str, Any]], reward_model: Path | None, configs: Any) -> str:
    """The text, which has passed the check of a dry run. In `rl` with vLLM where that runs the model.

    Raises: ValueError with what no choice of ours can mend.
    """
    engines = ["vllm", "megatron"] if find_spec("vllm") or draft.machine.device == "gpu" else ["megatron"]
    engines = engines if draft.command == "rl" else ["none"]
    undecided, why = list(draft.undecided), "vLLM is not installed"
    for engine in engines:
        draft.undecided[:] = undecided
        if engine == "megatron":
            draft.undecided.append(f"rollout.engine: megatron is slow, and vllm was not possible: {why}")
        text = text_of(draft, rewards=rewards, engine=engine, reward_model=reward_model)
        try:
            _check(draft, text, configs)
        except ValueError as error:
            if engine == engines[-1]:
                raise
            why = str(error)
            continue
        return text
    raise AssertionError("there is always an engine to try")


def _check(draft: Draft, text: str, configs: Any) -> None:
    """Raises: ValueError as a dry run of this text."""
    handle, name = tempfile.mkstemp(suffix=".yaml", prefix="megarlhf-init-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        cfg = load_config(configs[draft.command], name)
        device_type = GPU if draft.machine.device == "gpu" else "cpu"
        preflight(draft.command, cfg, draft.machine.ranks, device_type=device_type, all_records=True)
    except ValueError as error:
        raise ValueError(str(error).replace(name, "what would be written")) from None
    finally:
        Path(name).unlink()
