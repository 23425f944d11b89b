"""The command line of the checkpoint converter, apart from what it converts with, which takes seconds to import."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from megarlhf.commands.arguments.parser import Parser, add_families, command_first, num_bytes, positive, positives
from megarlhf.model_directory import GGUF_COMMAND

DTYPES = ("bf16", "fp16", "fp32")
"""Names of dtypes in `weights/checkpoint/conversion.py`."""


def parse(argv: Sequence[str] | None, prog: str) -> argparse.Namespace:
    """Options may stand anywhere, also ahead of the converter's command."""
    root = parser(prog)
    commands = root.get_default("commands")
    argv = sys.argv[1:] if argv is None else argv
    if "gguf-to-hf" in argv and not set(commands) & set(argv):
        root.error(f"gguf-to-hf is a tool of its own, in a clone of megarlhf: {GGUF_COMMAND} --gguf FILE --out DIR")
    return root.parse_args(command_first(argv, {name: partial(commands.get, name) for name in commands}))


def parser(prog: str = "python -m tools.checkpoint_convert") -> Parser:
    """The converter's command line."""
    root = Parser(
        prog=prog,
        description="Converts checkpoints between Hugging Face and Megatron. No GPU is needed.",
    )
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
    to_megatron = commands.add_parser("hf-to-megatron", help="a Hugging Face directory to a Megatron checkpoint")
    to_megatron.add_argument("--hf", type=Path, required=True, metavar="DIR", help="Hugging Face directory")
    add_output_options(to_megatron)
    _add_layout(to_megatron)
    to_hf = commands.add_parser("megatron-to-hf", help="a Megatron checkpoint to a Hugging Face directory")
    _add_megatron(to_hf)
    add_output_options(to_hf)
    add_shard_size_option(to_hf)
    relayout = commands.add_parser("relayout", help="a Megatron checkpoint to another layout, format or spec")
    _add_megatron(relayout)
    add_output_options(relayout)
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
    verify.add_argument("--dtype", choices=DTYPES, help="compare after a cast")
    for sub in commands.choices.values():
        add_families(sub)
    root.set_defaults(commands=commands.choices)
    return root


def _add_megatron(sub: Parser) -> None:
    sub.add_argument("--megatron", type=Path, required=True, metavar="DIR", help="checkpoint, torch_dist or mp_rank")
    _add_reference(sub)


def _add_reference(sub: Parser) -> None:
    sub.add_argument(
        "--reference-hf",
        type=Path,
        metavar="DIR",
        help="its config.json describes the Megatron model, its tokenizer is copied; default: what the checkpoint has",
    )


def add_shard_size_option(sub: Parser) -> None:
    words, size = "of one safetensors file", 5 * 10**9
    sub.add_argument(
        "--max-shard-size", dest="max_shard_bytes", type=num_bytes, default=size, metavar="5GB", help=words
    )


def add_output_options(sub: Parser, *, dtype: str | None = None, help: str = "default: that of the source") -> None:
    sub.add_argument("--out", type=Path, required=True, metavar="DIR")
    sub.add_argument("--dtype", choices=DTYPES, default=dtype, help=help)
    sub.add_argument("--force", action="store_true", help="replace an existing checkpoint, once the new one is whole")
    sub.add_argument("--workers", type=positive, metavar="N", help="threads; default: all cores")


def _add_layout(sub: Parser) -> None:
    sub.add_argument("--checksums", action="store_true", help="write the CRC-32 of every tensor, for `inspect --check`")
    sub.add_argument("--tp", type=positive, default=1, help="tensor-parallel size")
    sub.add_argument("--pp", type=positive, default=1, help="pipeline-parallel size")
    sub.add_argument("--vpp", type=positive, default=1, help="model chunks of each pipeline stage")
    sub.add_argument("--ep", type=positive, default=1, help="expert-parallel size")
    sub.add_argument("--layers-per-stage", type=positives, metavar="10,11,11", help="uneven pipeline stages")
    sub.add_argument("--format", choices=("torch_dist", "mp_rank"), default="torch_dist")
    sub.add_argument("--spec", choices=("local", "te"), default="te", help="whose names norms and experts get")
    sub.add_argument("--experts", choices=("each", "grouped"), default="each", help="how experts are stored")
    words = "pad the vocabulary to a multiple of N x tp; default 128"
    sub.add_argument("--vocab-pad", dest="vocab_multiple", type=positive, metavar="N", help=words)
    words = "rows in all; wins over --vocab-pad"
    sub.add_argument("--padded-vocab-size", dest="padded_vocab", type=positive, metavar="N", help=words)
