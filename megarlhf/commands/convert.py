"""The checkpoint converter's commands: arguments in, a table or a message out; the work is in `weights/`.

`python -m tools.checkpoint_convert` and `megarlhf convert` both call `main`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

import torch

from megarlhf.architectures.placements import logical_tensors
from megarlhf.commands.convert_arguments import parse
from megarlhf.observe.terminal.copy_progress import bytes_bar, count_bar
from megarlhf.observe.terminal.progress import make_console, table
from megarlhf.weights.checkpoint.checksums import check_checksums, has_checksums
from megarlhf.weights.checkpoint.conversion import DTYPES, HuggingFaceTarget, MegatronTarget, Target, convert
from megarlhf.weights.checkpoint.describe import describe
from megarlhf.weights.checkpoint.open_checkpoint import Checkpoint, open_checkpoint
from megarlhf.weights.checkpoint.staging import Staging
from megarlhf.weights.checkpoint.verify import differences, digests
from megarlhf.weights.checks.digest import whole_digest


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m tools.checkpoint_convert") -> int:
    """Entry point; returns the exit status. 1: `verify` found a difference. 2: the user's or the disk's mistake."""
    arguments = parse(argv, prog)
    torch.set_num_threads(1)  # pieces are copied side by side; threads inside a copy would only compete
    try:
        _register(arguments.families)
        return _COMMANDS[arguments.command](arguments)
    except (ValueError, OSError) as error:
        print(f"{prog} {arguments.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{prog} {arguments.command}: interrupted; nothing is left behind", file=sys.stderr)
        return 130


def _register(families: Sequence[str]) -> None:
    """Make the user's model families known. The check of them needs pydantic, which no other part of this does."""
    if families:
        from megarlhf.architectures.own_families import register_families

        register_families(families)


def require_possible_output(out: Path) -> None:
    """Raises ValueError where a file is in the way of a directory `out`, before anything is read."""
    nearest = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if not nearest.is_dir():
        which = "is a file" if nearest == out.absolute() else f"is below {nearest}, which is a file"
        raise ValueError(f"--out {out} {which}; name a directory")


def _open_source(arguments: argparse.Namespace) -> Checkpoint:
    """The source; when it is the output too, as a killed replacement of it may have left it."""
    if "hf" in arguments:
        return open_checkpoint(arguments.hf)
    if arguments.megatron.resolve() == arguments.out.resolve():
        Staging.bring_back(arguments.out)
    return open_checkpoint(arguments.megatron, hf=arguments.reference_hf)


def _target(arguments: argparse.Namespace) -> Target:
    if "max_shard_bytes" in arguments:
        return HuggingFaceTarget(max_shard_bytes=arguments.max_shard_bytes)
    return MegatronTarget(**{field.name: getattr(arguments, field.name) for field in fields(MegatronTarget)})


def _convert(arguments: argparse.Namespace) -> int:
    require_possible_output(arguments.out)
    source = _open_source(arguments)
    with bytes_bar("converting") as (started, progress):
        written = convert(
            source,
            arguments.out,
            _target(arguments),
            dtype=DTYPES.get(arguments.dtype),
            force=arguments.force,
            workers=arguments.workers,
            checksums=getattr(arguments, "checksums", False),
            started=started,
            progress=progress,
        )
    print(f"wrote {arguments.out}: {written / 1e9:.3f} GB of tensors")
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    model = open_checkpoint(arguments.directory, hf=arguments.reference_hf)
    console = make_console()
    console.print(table(str(arguments.directory), list(describe(model).items()), ("", "")))
    if arguments.tensors:
        rows = [
            (number, name, list(extent.shape), str(extent.dtype).removeprefix("torch."), extent.num_bytes)
            for number, extents in enumerate(model.weights.extents)
            for name, extent in extents.items()
        ]
        console.print(table("tensors", rows, ("part", "name", "shape", "dtype", "bytes")))
    if arguments.check:
        return _check(model)
    return 0


def _check(model: Checkpoint) -> int:
    """Reads every byte; compares the CRCs of formats that have them."""
    if model.format == "huggingface" and not has_checksums(model.directory):
        print("safetensors stores no checksums: nothing to compare; every tensor will be read")
    else:
        count, unstated = check_checksums(model.directory)
        print(f"the CRC-32 of {count - unstated} of {count} stored tensors or files is right; {unstated} state none")
    print(f"digest of the model: {whole_digest(_digests(model))}")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    a, b = (open_checkpoint(path, hf=arguments.reference_hf) for path in (arguments.a, arguments.b))
    dtype = DTYPES.get(arguments.dtype)
    digests_a, digests_b = (_digests(model, dtype) for model in (a, b))
    difference = differences(a, b, digests_a, digests_b, dtype)
    if difference:
        print(f"not the same model:\n{difference}")
        return 1
    print(f"the same model: {len(digests_a)} tensors, digest {whole_digest(digests_a)}")
    return 0


def _digests(model: Checkpoint, dtype: torch.dtype | None = None) -> dict[str, int]:
    with count_bar(f"reading {model.directory}", len(logical_tensors(model.arch, model.head))) as progress:
        return digests(model, dtype=dtype, progress=progress)


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "hf-to-megatron": _convert,
    "megatron-to-hf": _convert,
    "relayout": _convert,
    "inspect": _inspect,
    "verify": _verify,
}

if __name__ == "__main__":
    raise SystemExit(main())
