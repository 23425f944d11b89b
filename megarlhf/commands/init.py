"""`megarlhf init`: writes a commented configuration for a model and data, which passes `--dry-run`."""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

from megarlhf.architectures.own_families import register_families
from megarlhf.config import DataConfig, load_config
from megarlhf.planning.data.rewards import rule_for_answers
from megarlhf.planning.init.configuration import ROLE, Draft, Machine, choose_layout, config_text
from megarlhf.planning.init.inspection import DataLook, look_at_data, look_at_model
from megarlhf.planning.preflight import preflight
from megarlhf.runtime import GPU, capabilities


def init(arguments: argparse.Namespace, configs: Any) -> int:
    """Write the configuration. Raises: ValueError for a model and data that are missing or do not fit together, or for
    a file that would be overwritten."""
    try:
        return _write(arguments, configs)
    except ValueError as error:  # which may advise keys that `init` has no options for
        if not any(key in DataConfig.model_fields for key in re.findall(r"\bdata\.(\w+)", str(error))):
            raise
        raise ValueError(
            f"{error} (`init` takes no keys of data: change the data, or begin with a file of configs/ and set them)"
        ) from error


def _write(arguments: argparse.Namespace, configs: Any) -> int:
    register_families(arguments.families)
    model = look_at_model(arguments.model, tuple(arguments.families))
    data = look_at_data(Path(arguments.data), arguments.split, arguments.for_command, model)
    command = data.command
    out = Path(arguments.out or f"{command}.yaml")
    if out.exists():
        raise ValueError(f"{out} exists, and is not overwritten; name another file with -o")
    if model.head == "scalar" and command != "rm":
        raise ValueError(
            f"{model.path} is a reward model or a critic, and {command} trains a language model; give one, or "
            "--command rm"
        )
    run_dirs = (Path("runs", command if number == 1 else f"{command}-{number}") for number in count(1))
    run_dir = next(path for path in run_dirs if not path.exists()) if arguments.run_dir is None else arguments.run_dir
    draft = Draft(command, model, data, _machine(arguments), Path(run_dir))
    choose_layout(draft)
    _add_notes(draft, arguments)
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


def _machine(arguments: argparse.Namespace) -> Machine:
    here = capabilities()
    device = arguments.device or ("gpu" if here.device_count else "cpu")
    gpus = here.device_count if device == "gpu" else 0
    if device == "gpu" and not (arguments.nproc or gpus):
        raise ValueError("--device gpu, and this machine has none to count: say how many with --nproc")
    return Machine(device=device, ranks=arguments.nproc or gpus or 1, gpu_gib=arguments.gpu_memory_gib)


def _add_notes(draft: Draft, arguments: argparse.Namespace) -> None:
    """Add open decisions on the command and the model."""
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
    """Rewards of the responses. Raises: ValueError where neither options nor data give one."""
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
    """The configuration, after the check of a dry run. `rl` uses vLLM if that can run the model.

    Raises: ValueError for what another choice cannot mend.
    """
    undecided, reason = list(draft.undecided), "vLLM is not installed"
    if draft.command != "rl" or find_spec("vllm") or draft.machine.device == "gpu":
        text = config_text(draft, rewards=rewards, engine="vllm", reward_model=reward_model)
        try:
            _check(draft, text, configs)
            return text
        except ValueError as error:
            if draft.command != "rl":
                raise
            reason = str(error)
    draft.undecided[:] = [*undecided, f"rollout.engine: megatron is slow, and vllm was not possible: {reason}"]
    text = config_text(draft, rewards=rewards, engine="megatron", reward_model=reward_model)
    _check(draft, text, configs)
    return text


def _check(draft: Draft, text: str, configs: Any) -> None:
    """Check a text as a dry run does. Raises: ValueError."""
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
