"""The checkpoint converter's commands: arguments in, a table or a message out; the work is in `weights/`.

`python -m tools.checkpoint_convert` and `megarlhf convert` both call `main`.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from megarlhf.architectures.placements import logical_tensors
from megarlhf.observe.progress import make_console, table
from megarlhf.weights.checkpoint.checksums import check_checksums, has_checksums
from megarlhf.weights.checkpoint.conversion import DTYPES, HuggingFaceTarget, MegatronTarget, Target, convert
from megarlhf.weights.checkpoint.staging import Staging
from megarlhf.weights.checkpoint.stored_model import StoredModel, open_model
from megarlhf.weights.checkpoint.verify import Digests, differences, digests

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


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
    to_hf.add_argument("--max-shard-size", type=_size, default=5 * 10**9, metavar="5GB", help="of one safetensors file")
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
    sub.add_argument("--workers", type=_positive, metavar="N", help="threads; default: all cores")


def _add_layout(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--checksums", action="store_true", help="write the CRC-32 of every tensor, for `inspect --check`")
    sub.add_argument("--tp", type=_positive, default=1, help="tensor-parallel size")
    sub.add_argument("--pp", type=_positive, default=1, help="pipeline-parallel size")
    sub.add_argument("--vpp", type=_positive, default=1, help="model chunks of each pipeline stage")
    sub.add_argument("--ep", type=_positive, default=1, help="expert-parallel size")
    sub.add_argument("--layers-per-stage", type=_numbers, metavar="10,11,11", help="uneven pipeline stages")
    sub.add_argument("--format", choices=("torch_dist", "mp_rank"), default="torch_dist")
    sub.add_argument("--spec", choices=("local", "te"), default="te", help="whose names norms and experts get")
    sub.add_argument("--experts", choices=("each", "grouped"), default="each", help="how experts are stored")
    sub.add_argument(
        "--vocab-pad", type=_positive, metavar="N", help="pad the vocabulary to a multiple of N x tp; default 128"
    )
    sub.add_argument("--padded-vocab-size", type=_positive, metavar="N", help="rows in all; wins over --vocab-pad")


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
    return _convert(arguments, open_model(arguments.hf), _megatron_target(arguments))


def _to_huggingface(arguments: argparse.Namespace) -> int:
    source = _open_megatron(arguments)
    return _convert(arguments, source, HuggingFaceTarget(max_shard_bytes=arguments.max_shard_size))


def _relayout(arguments: argparse.Namespace) -> int:
    return _convert(arguments, _open_megatron(arguments), _megatron_target(arguments))


def _open_megatron(arguments: argparse.Namespace) -> StoredModel:
    """The source; when it is the output too, as a killed replacement of it may have left it."""
    if arguments.megatron.resolve() == arguments.out.resolve():
        Staging.bring_back(arguments.out)
    return open_model(arguments.megatron, hf=arguments.reference_hf)


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


def _convert(arguments: argparse.Namespace, source: StoredModel, target: Target) -> int:
    with _bytes_bar("converting") as (started, progress):
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
    model = open_model(arguments.directory, hf=arguments.reference_hf)
    console = make_console()
    console.print(table(str(arguments.directory), list(_facts(model).items()), ("", "")))
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


def _facts(model: StoredModel) -> dict[str, object]:
    arch, layout = model.arch, model.layout
    tensors = logical_tensors(arch, model.head)
    parameters = sum(torch.Size(shape).numel() for shape in tensors.values())
    files = {extent.path for extents in model.weights.extents for extent in extents.values()}
    facts: dict[str, object] = {"format": model.kind}
    if layout is not None:
        facts["layout"] = f"tp {layout.tp}, pp {layout.pp}, vpp {layout.vpp}, ep {layout.ep}"
        if layout.layers_per_stage is not None:
            facts["layers per stage"] = ", ".join(map(str, layout.layers_per_stage))
        facts["spec"] = layout.spec if not arch.num_experts else f"{layout.spec}, experts {layout.experts}"
        facts["padded vocabulary"] = layout.padded_vocab
    if model.iteration is not None:
        facts["iteration"] = model.iteration
    facts |= {
        "architecture": f"{arch.model_type}, {'language model' if model.head == 'lm' else 'scalar head'}",
        "layers": arch.num_layers,
        "hidden": arch.hidden_size,
        "heads": f"{arch.num_heads} of {arch.head_dim}, {arch.num_kv_heads} KV",
        "MLP": arch.ffn_size if not arch.num_experts else f"{arch.num_experts} experts of {arch.expert_ffn_size}",
        "vocabulary": f"{arch.vocab_size}{', tied' if arch.tied_embeddings else ''}",
        "positions": f"{arch.max_positions}, {arch.positions}",
        "parameters": parameters,
        "dtype": ", ".join(str(dtype).removeprefix("torch.") for dtype in model.weights.dtypes()),
        "tensors": f"{len(tensors)} logical, {sum(map(len, model.weights.extents))} stored",
        "files": f"{len(files)}, {sum(path.stat().st_size for path in files) / 1e9:.3f} GB",
        "config and tokenizer": model.companion or "none; from the arguments",
    }
    return facts


def _check(model: StoredModel) -> int:
    """Reads every byte; compares the CRCs of formats that have them."""
    if model.kind == "huggingface" and not has_checksums(model.directory):
        print("safetensors stores no checksums: nothing to compare; every tensor will be read")
    else:
        count, silent = check_checksums(model.directory)
        print(f"the CRC-32 of {count - silent} of {count} stored tensors or files is right; {silent} state none")
    with _count_bar("reading", len(logical_tensors(model.arch, model.head))) as progress:
        print(f"digest of the model: {digests(model, progress=progress).whole()}")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    a, b = (open_model(path, hf=_reference(path, arguments.reference_hf)) for path in (arguments.a, arguments.b))
    dtype = None if arguments.dtype is None else DTYPES[arguments.dtype]
    both_digests: list[Digests] = []
    for model in (a, b):
        with _count_bar(f"reading {model.directory}", len(logical_tensors(model.arch, model.head))) as progress:
            both_digests.append(digests(model, dtype=dtype, progress=progress))
    difference = differences(a, b, both_digests[0], both_digests[1], dtype)
    if difference:
        print(f"not the same model:\n{difference}")
        return 1
    print(f"the same model: {len(both_digests[0].tensors)} tensors, digest {both_digests[0].whole()}")
    return 0


def _reference(path: Path, reference: Path | None) -> Path | None:
    """--reference-hf describes Megatron checkpoints; a Hugging Face directory describes itself."""
    return None if (path / "config.json").is_file() else reference


@contextmanager
def _bytes_bar(what: str) -> Iterator[tuple[Callable[[int], None], Callable[[int], None]]]:
    """Bytes, speed and time left, on stderr."""
    from rich.console import Console

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("planning", total=None)
        plain = None if sys.stderr.isatty() else _PlainLines(what)

        def started(total: int) -> None:
            bar.update(task, total=total, description=what)
            if plain is not None:
                plain.start(total)

        def progress(count: int) -> None:
            bar.advance(task, count)
            if plain is not None:
                plain.advance(count)

        yield started, progress


@contextmanager
def _count_bar(what: str, total: int) -> Iterator[Callable[[str], None]]:
    from rich.console import Console

    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(what, total=total)
        yield lambda name: bar.advance(task)


class _PlainLines:
    """Where stderr is a file: a line when the plan is made, and for every tenth."""

    def __init__(self, what: str) -> None:
        import time

        self.what, self.total, self._done, self._reported = what, 0, 0, 0
        self._clock, self._start = time.monotonic, time.monotonic()
        self._lock = threading.Lock()

    def start(self, total: int) -> None:
        self.total = total
        print(f"{self.what}: {total / 1e9:.3f} GB, planned in {self._clock() - self._start:.1f} s", file=sys.stderr)
        self._start = self._clock()

    def advance(self, count: int) -> None:
        with self._lock:
            self._done += count
            tenth = 10 * self._done // self.total if self.total else 0
            if tenth > self._reported:
                self._reported = tenth
                seconds = self._clock() - self._start
                left = seconds * (self.total - self._done) / self._done
                print(
                    f"{self.what}: {self._done / 1e9:.3f} of {self.total / 1e9:.3f} GB, {left:.0f} s left",
                    file=sys.stderr,
                )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))


def _size(text: str) -> int:
    """`5GB`, `500MB`, `2GiB`, or bytes."""
    digits = text.rstrip("BbKkMmGgTtIi ")
    unit = text[len(digits) :].strip().upper() or "B"
    try:
        size = int(float(digits) * UNITS[unit])
    except (ValueError, KeyError, OverflowError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 5GB") from error
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size that holds anything; give one such as 5GB")
    return size


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "hf-to-megatron": _to_megatron,
    "megatron-to-hf": _to_huggingface,
    "relayout": _relayout,
    "inspect": _inspect,
    "verify": _verify,
}

if __name__ == "__main__":
    raise SystemExit(main())
