"""The checkpoint converter's commands: arguments in, a table or a message out; the work is in `weights/`.

`python -m tools.checkpoint_convert` and `megarlhf convert` both call `main`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from megarlhf.architectures.placements import logical_tensors
from megarlhf.commands.arguments import num_bytes, positive, positives
from megarlhf.observe.copy_progress import bytes_bar, count_bar
from megarlhf.observe.progress import make_console, table
from megarlhf.weights.checkpoint.checksums import check_checksums, has_checksums
from megarlhf.weights.checkpoint.conversion import DTYPES, HuggingFaceTarget, MegatronTarget, Target, convert
from megarlhf.weights.checkpoint.describe import describe
from megarlhf.weights.checkpoint.open_checkpoint import Checkpoint, open_checkpoint
from megarlhf.weights.checkpoint.staging import Staging
from megarlhf.weights.checkpoint.verify import differences, digests
from megarlhf.weights.checks.digest import whole_digest


def parser(prog: str = "python -m tools.checkpoint_convert") -> argparse.ArgumentParser:
    """The converter's command line."""
    root = argparse.ArgumentParser(
        prog=prog, description="Converts checkpoints between Hugging Face and Megatron. No GPU is needed."
    )
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
    to_megatron = commands.add_parser("hf-to-megatron", help="a Hugging Face directory to a Megatron checkpoint")
    to_megatron.add_argument("--hf", type=Path, required=True, metavar="DIR", help="Hugging Face directory")
    _add_output(to_megatron)
    _add_layout(to_megatron)
    to_hf = commands.add_parser("megatron-to-hf", help="a Megatron checkpoint to a Hugging Face directory")
    _add_megatron(to_hf)
    _add_output(to_hf)
    to_hf.add_argument(
        "--max-shard-size", type=num_bytes, default=5 * 10**9, metavar="5GB", help="of one safetensors file"
    )
    relayout = commands.add_parser("relayout", help="a Megatron checkpoint to another layout, format or spec")
    _add_megatron(relayout)
    _add_output(relayout)
    _add_layout(relayout)
    inspect = commands.add_parser("inspect", help="what a directory is: format, layout, architecture, sizes")
    inspect.add_argument("directory", type=Path, metavar="DIR")
    _add_reference(inspect)
    inspect.add_argument("--tensors", action="store_true", help="list every tensor")
    inspect.add_argument("--check", action="store_true", help="also read every byte and compare the stored CRCs")
    verify = commands.add_parser("verify", help="whether two directories, of any kind, hold the same model")
    verify.add_argument("a", type=Path, metavar="A")
    verify.add_argument("b", type=Path, metavar="B")
    _add_reference(verify)
    verify.add_argument("--dtype", choices=sorted(DTYPES), help="compare after a cast")
    return root


def _add_megatron(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--megatron", type=Path, required=True, metavar="DIR", help="checkpoint, torch_dist or mp_rank")
    _add_reference(sub)


def _add_reference(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--reference-hf",
        type=Path,
        metavar="DIR",
        help="its config.json describes the Megatron model, its tokenizer is copied; default: what the checkpoint has",
    )


def _add_output(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--out", type=Path, required=True, metavar="DIR")
    sub.add_argument("--dtype", choices=sorted(DTYPES), help="default: that of the source")
    sub.add_argument("--force", action="store_true", help="replace an existing checkpoint, once the new one is whole")
    sub.add_argument("--workers", type=positive, metavar="N", help="threads; default: all cores")


def _add_layout(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--checksums", action="store_true", help="write the CRC-32 of every tensor, for `inspect --check`")
    sub.add_argument("--tp", type=positive, default=1, help="tensor-parallel size")
    sub.add_argument("--pp", type=positive, default=1, help="pipeline-parallel size")
    sub.add_argument("--vpp", type=positive, default=1, help="model chunks of each pipeline stage")
    sub.add_argument("--ep", type=positive, default=1, help="expert-parallel size")
    sub.add_argument("--layers-per-stage", type=positives, metavar="10,11,11", help="uneven pipeline stages")
    sub.add_argument("--format", choices=("torch_dist", "mp_rank"), default="torch_dist")
    sub.add_argument("--spec", choices=("local", "te"), default="te", help="whose names norms and experts get")
    sub.add_argument("--experts", choices=("each", "grouped"), default="each", help="how experts are stored")
    sub.add_argument(
        "--vocab-pad", type=positive, metavar="N", help="pad the vocabulary to a multiple of N x tp; default 128"
    )
    sub.add_argument("--padded-vocab-size", type=positive, metavar="N", help="rows in all; wins over --vocab-pad")


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m tools.checkpoint_convert") -> int:
    """Entry point; returns the exit status. 1: `verify` found a difference. 2: the user's or the disk's mistake."""
    arguments = parser(prog).parse_args(argv)
    torch.set_num_threads(1)  # pieces are copied side by side; threads inside a copy would only compete
    try:
        return _COMMANDS[arguments.command](arguments)
    except (ValueError, OSError) as error:
        print(f"{prog} {arguments.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{prog} {arguments.command}: interrupted; nothing is left behind", file=sys.stderr)
        return 130


def _to_megatron(arguments: argparse.Namespace) -> int:
    return _convert(arguments, open_checkpoint(arguments.hf), _megatron_target(arguments))


def _to_huggingface(arguments: argparse.Namespace) -> int:
    source = _open_megatron(arguments)
    return _convert(arguments, source, HuggingFaceTarget(max_shard_bytes=arguments.max_shard_size))


def _relayout(arguments: argparse.Namespace) -> int:
    return _convert(arguments, _open_megatron(arguments), _megatron_target(arguments))


def _open_megatron(arguments: argparse.Namespace) -> Checkpoint:
    """The source; when it is the output too, as a killed replacement of it may have left it."""
    if arguments.megatron.resolve() == arguments.out.resolve():
        Staging.bring_back(arguments.out)
    return open_checkpoint(arguments.megatron, hf=arguments.reference_hf)


def _megatron_target(arguments: argparse.Namespace) -> MegatronTarget:
    return MegatronTarget(
        tp=arguments.tp,
        pp=arguments.pp,
        vpp=arguments.vpp,
        ep=arguments.ep,
        layers_per_stage=arguments.layers_per_stage,
        format=arguments.format,
        spec=arguments.spec,
        experts=arguments.experts,
        vocab_multiple=arguments.vocab_pad,
        padded_vocab=arguments.padded_vocab_size,
    )


def _convert(arguments: argparse.Namespace, source: Checkpoint, target: Target) -> int:
    with bytes_bar("converting") as (started, progress):
        written = convert(
            source,
            arguments.out,
            target,
            dtype=None if arguments.dtype is None else DTYPES[arguments.dtype],
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
    dtype = None if arguments.dtype is None else DTYPES[arguments.dtype]
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
    "hf-to-megatron": _to_megatron,
    "megatron-to-hf": _to_huggingface,
    "relayout": _relayout,
    "inspect": _inspect,
    "verify": _verify,
}

if __name__ == "__main__":
    raise SystemExit(main())
