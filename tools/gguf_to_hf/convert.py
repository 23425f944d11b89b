"""Converts a GGUF file to a Hugging Face directory, some rows of a tensor at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from itertools import zip_longest
from os import PathLike
from pathlib import Path
from types import MappingProxyType

import torch

from megarlhf.architectures.hf_config import hf_config
from megarlhf.data.text.templates import chat_template, has_template
from megarlhf.data.tokenizers import files as on_disk
from megarlhf.data.tokenizers.comparison import transformers_difference
from megarlhf.data.tokenizers.sample_texts import TEXTS
from megarlhf.data.tokenizers.tokenizer import HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer, load_tokenizer
from megarlhf.weights.checkpoint.formats.huggingface.write import MAX_SHARD_BYTES, preallocate_huggingface
from megarlhf.weights.checkpoint.open_checkpoint import open_checkpoint
from megarlhf.weights.checkpoint.replaceable import require_replaceable
from megarlhf.weights.checkpoint.staging import Staging
from megarlhf.weights.transport.extent import Extent
from tools.gguf_to_hf.header import GGUFFile, read_gguf
from tools.gguf_to_hf.model import architecture_of
from tools.gguf_to_hf.names import Source, sources
from tools.gguf_to_hf.numbers import Numbers
from tools.gguf_to_hf.tokenizer import (
    ENDS,
    NORMAL,
    UNUSED,
    TokenizerFiles,
    chat_templates,
    tokenizer_files,
)

PIECE_ELEMENTS = 1 << 20
"""Of a tensor at a time and thread."""


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What was written."""

    num_bytes: int
    """Of tensors."""
    stored_as: str
    """ggml's types of the source."""
    notes: tuple[str, ...]
    """What the user should know, in sentences."""


def convert_gguf(
    source: str | PathLike[str],
    out: str | PathLike[str],
    *,
    dtype: torch.dtype = torch.float32,
    tokenizer: str | PathLike[str] | None = None,
    files: Mapping[str, bytes] = MappingProxyType({}),
    force: bool = False,
    workers: int | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    started: Callable[[int], None] = lambda total_bytes: None,
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> Converted:
    """Writes the model of a GGUF file to `out`, which appears whole or not at all.

    dtype: fp32 holds every number of every type of ggml's that can be read
    tokenizer: a directory whose tokenizer is taken in place of the file's
    files: further ones, by name
    Memory: some ten times `PIECE_ELEMENTS` x 4 bytes a thread at most, a whole matrix for GPT-2, and the tokenizer.

    Raises: ValueError, before anything is written, when the file is damaged, its family or tokenizer is not known, its
    tensors are not exactly the model's, or the output exists (without `force`); while writing, for numbers that are
    none, or that fp16 cannot hold. Nothing is left then.
    """
    file = read_gguf(source)
    numbers = Numbers(file)
    arch = architecture_of(file, numbers)
    try:
        config = hf_config(arch)
    except ValueError as error:
        raise ValueError(f"{file.path}: {error}") from error
    tensors = sources(file, arch)
    beside = tokenizer_files(file, arch.vocab_size) if tokenizer is None else _given(file, Path(tokenizer))
    if force:
        require_replaceable(Path(out), file.path)
    specs = {name: (of.shape, dtype) for name, of in tensors.items()}
    total = sum(torch.Size(shape).numel() for shape, _ in specs.values()) * dtype.itemsize
    with Staging(out, force=force) as staging:
        staging.reserve(total)
        for name, content in {**beside.contents, **files}.items():
            (staging.path / name).parent.mkdir(exist_ok=True)
            (staging.path / name).write_bytes(content)
        beside, notes = _checked(file, staging.path, beside, arch.vocab_size)
        # Without pad_token_id: transformers gives a padding token's embedding no gradient, and it may be the end token.
        ids = {"bos_token_id": beside.bos_id, "eos_token_id": _one_or_list(beside.end_ids)}
        config |= {**ids, "dtype": str(dtype).removeprefix("torch.")}
        generation = {**ids, "pad_token_id": beside.pad_id}
        stated = {key: value for key, value in generation.items() if value is not None}
        (staging.path / "generation_config.json").write_text(json.dumps(stated, indent=2) + "\n", encoding="utf-8")
        places = preallocate_huggingface(staging.path, specs, config, max_shard_bytes=max_shard_bytes)
        started(total)
        _write(numbers, tensors, places, workers, progress)
        open_checkpoint(staging.path)
    return Converted(num_bytes=total, stored_as=numbers.type_names(), notes=notes)


def _one_or_list(ids: tuple[int, ...]) -> int | list[int]:
    return ids[0] if len(ids) == 1 else list(ids)


# --- the tokenizer --------------------------------------------------------------------------------


def _given(file: GGUFFile, directory: Path) -> TokenizerFiles:
    """The tokenizer of a directory. Raises: ValueError when it is not the file's."""
    loaded = load_tokenizer(directory)
    named = _require_same_tokens(file, directory, loaded)
    if directory.is_dir():
        paths = on_disk.tokenizer_files(directory)
        contents = {str(path.relative_to(directory)): path.read_bytes() for path in paths}
    else:
        contents = {"tokenizer.model": directory.read_bytes()}
    if not has_template(loaded):
        contents |= chat_templates(file)
    assert isinstance(loaded, HuggingFaceTokenizer | SentencePieceTokenizer), "there are no others on disk"
    unchecked = f"the file has no tokens that those of {directory} could be compared with"
    return TokenizerFiles(
        contents=contents,
        tokens=loaded.tokens(),
        bos_id=loaded.named_bos_id,
        pad_id=loaded.pad_id,
        end_ids=tuple(dict.fromkeys((loaded.eos_id, *(named or ())))),
        backend=None,
        notes=() if named is not None else (unchecked,),
    )


def _require_same_tokens(file: GGUFFile, directory: Path, loaded: Tokenizer) -> list[int] | None:
    """The end tokens that the file names; None where it has no tokens.

    Raises: ValueError when a token of the directory's tokenizer is another one in the file.
    """
    theirs, types = (file.metadata.get(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    if not isinstance(theirs, list):
        return None
    kinds = types if isinstance(types, list) and len(types) == len(theirs) else [NORMAL] * len(theirs)
    for number, (ours, other, kind) in enumerate(zip_longest(loaded.tokens(), theirs, kinds)):
        unused = not ours and kind in (UNUSED, None)
        if ours != other and kind != UNUSED and not unused:
            stated = [repr(token) if token else "missing" for token in (ours, other)]
            raise ValueError(
                f"token {number} is {stated[0]} in {directory} and {stated[1]} in {file.path}: they do not belong "
                "together; name the tokenizer of this model"
            )
    ends = (file.metadata.get(f"tokenizer.ggml.{name}") for name in ENDS)
    return [token for token in ends if type(token) is int and 0 <= token < len(theirs)]


def _checked(
    file: GGUFFile, directory: Path, written: TokenizerFiles, vocab_size: int
) -> tuple[TokenizerFiles, tuple[str, ...]]:
    """What was written, read as training reads it; with the token that ends a turn among the ends, and notes.

    Raises: ValueError when it is read as another tokenizer than was meant.
    """
    loaded = load_tokenizer(directory)
    same = _same(loaded, written) and (written.backend is None or transformers_difference(directory, loaded) is None)
    if len(loaded.tokens()) > vocab_size or not same:
        raise ValueError(
            f"the tokenizer of {file.path} is read by transformers as another one than the file describes; name a "
            "directory that has the model's own tokenizer: --tokenizer DIR"
        )
    if not has_template(loaded):
        note = "the file has no chat template, and none was written: conversations need data.chat_template"
        return written, (*written.notes, note)
    try:
        end = chat_template(loaded).turn_end
    except ValueError as error:
        return written, (*written.notes, f"the chat template was written as it is, and fails: {error}")
    if end is None or end in written.end_ids:
        return written, written.notes
    note = (
        f"the chat template ends an answer with token {end} ({loaded.tokens()[end]}), which the file does not name as "
        "an end: generation_config.json names it too"
    )
    return replace(written, end_ids=(*written.end_ids, end)), (*written.notes, note)


def _same(loaded: Tokenizer, written: TokenizerFiles) -> bool:
    if written.backend is None:
        return True
    samples = [*TEXTS, *(f"a {written.tokens[token]}b" for token in written.end_ids)]
    ids = [written.backend.encode(text, add_special_tokens=False).ids for text in samples]
    start = written.backend.encode("a").ids[0]
    return (
        loaded.tokens() == list(written.tokens)
        and ids == [loaded.encode(text) for text in samples]
        and loaded.eos_id == written.end_ids[0]
        and loaded.bos_id == (start if start == written.bos_id else None)
    )


# --- the tensors ----------------------------------------------------------------------------------

Piece = tuple[str, int, int]
"""A tensor's rows from one to before another."""


def _pieces(tensors: Mapping[str, Source]) -> Iterator[Piece]:
    for name, source in tensors.items():
        row = torch.Size(source.shape).numel() // source.num_rows
        step = max(1, PIECE_ELEMENTS // row)
        for start in range(0, source.num_rows, step):
            yield name, start, min(start + step, source.num_rows)


def _write(
    numbers: Numbers,
    tensors: Mapping[str, Source],
    places: Mapping[str, Extent],
    workers: int | None,
    progress: Callable[[int], None],
) -> None:
    def write(piece: Piece) -> None:
        name, start, stop = piece
        source, place = tensors[name], places[name]
        values = _cast(name, source.read(numbers, start, stop), place.dtype, numbers.file)
        row_bytes = place.num_bytes // source.num_rows
        with place.path.open("r+b") as file:
            file.seek(place.offset + start * row_bytes)
            file.write(values.contiguous().view(-1).view(torch.uint8).numpy().data)
        progress(values.numel() * place.dtype.itemsize)

    with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0)), thread_name_prefix="gguf") as pool:
        try:
            for done in as_completed([pool.submit(write, piece) for piece in _pieces(tensors)]):
                done.result()
        except BaseException:  # also Ctrl-C: what has not begun is left
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _cast(name: str, values: torch.Tensor, dtype: torch.dtype, file: GGUFFile) -> torch.Tensor:
    """Raises: ValueError for what is no number, and for what this dtype cannot hold."""
    if not values.isfinite().all():
        raise ValueError(f"{file.path}: {name} has values that are no finite numbers; it is damaged: copy it again")
    cast = values.to(dtype)
    if not cast.isfinite().all():
        raise ValueError(
            f"{name} has numbers above {torch.finfo(dtype).max:.0f}, the largest of {dtype}; write bf16 or fp32"
        )
    return cast
