"""Converts a GGUF file to a Hugging Face directory.

python -m tools.gguf_to_hf --gguf FILE --out DIR [--tokenizer DIR]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from megarlhf.commands.arguments.parser import Parser
from megarlhf.commands.convert import require_possible_output
from megarlhf.commands.convert_arguments import add_output_options, add_shard_size_option
from megarlhf.observe.terminal.copy_progress import bytes_bar
from megarlhf.weights.checkpoint.conversion import DTYPES
from tools.gguf_to_hf.convert import convert_gguf

PROG = "python -m tools.gguf_to_hf"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status. 2: a mistake in the arguments, the file or the disk. 130: Ctrl-C."""
    arguments = parser().parse_args(argv)
    torch.set_num_threads(1)  # pieces are converted in parallel; threads inside a piece would compete
    try:
        _convert(arguments)
    except (ValueError, OSError) as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{PROG}: interrupted; nothing is left behind", file=sys.stderr)
        return 130
    return 0


def parser() -> Parser:
    """Command line of the tool."""
    root = Parser(prog=PROG, description="Converts a GGUF file of llama.cpp to a Hugging Face directory.")
    root.add_argument("--gguf", type=Path, required=True, metavar="FILE", help="the whole model in one file")
    words = "a directory with the model's own tokenizer, in place of the file's"
    root.add_argument("--tokenizer", type=Path, metavar="DIR", help=words)
    add_output_options(root, dtype="fp32", help="default: fp32, which holds every number of the file")
    add_shard_size_option(root)
    return root


def _convert(arguments: argparse.Namespace) -> None:
    require_possible_output(arguments.out)
    with bytes_bar("converting") as (started, progress):
        written = convert_gguf(
            arguments.gguf,
            arguments.out,
            dtype=DTYPES[arguments.dtype],
            tokenizer=arguments.tokenizer,
            force=arguments.force,
            workers=arguments.workers,
            max_shard_bytes=arguments.max_shard_bytes,
            started=started,
            progress=progress,
        )
    for note in written.notes:
        print(note)
    print(f"wrote {arguments.out}: {written.num_bytes / 1e9:.3f} GB of tensors, stored as {written.stored_as} before")


if __name__ == "__main__":
    raise SystemExit(main())
