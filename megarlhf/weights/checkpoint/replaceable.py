"""Checkpoints that `--force` may delete. It deletes nothing else, such as a home directory."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

from megarlhf.model_directory import COMPANION, find_part
from megarlhf.provenance import FILE as PROVENANCE
from megarlhf.weights.checkpoint.formats.megatron.tracker import TRACKER, find_checkpoint
from megarlhf.weights.checkpoint.hf_writer import TEMPLATES
from megarlhf.weights.checkpoint.open_checkpoint import detect_format

_OF_A_MODEL = (
    *("*.safetensors", "*.bin", "*.safetensors.index.json", "*.bin.index.json", "*config.json", PROVENANCE),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template.*"),
    *("*.model", "*.tiktoken", "configuration_*.py", "modeling_*.py", "tokenization_*.py"),
    *("README.md", "LICENSE*", "NOTICE*", "USE_POLICY*", ".gitattributes"),
)
"""Names of the files in a Hugging Face directory. Not all of a suffix: notes are .md too, and results .json."""


def require_replaceable(out: Path, source: Path) -> None:
    """Raises ValueError when `out` is there and is no checkpoint, holds anything else, or holds the source."""
    if not out.is_dir() or not any(out.iterdir()):
        return
    try:
        format = detect_format(out)
    except ValueError as error:
        raise ValueError(f"--force replaces checkpoints only, and {out} is none; remove it yourself") from error
    if find_part(out) != out:
        raise ValueError(f"--force would delete the tree {out}, of which the checkpoint is a part; write elsewhere")
    if out.resolve() in source.resolve().parents:
        raise ValueError(f"--force would delete {out} and in it the source {source}; write to another directory")
    others = _others(out) if format == "huggingface" else _others_of_a_root(out)
    if others:
        raise ValueError(
            f"--force would delete more of {out} than the checkpoint: {', '.join(others[:5])}"
            f"{f' and {len(others) - 5} more' if len(others) > 5 else ''}; write to another directory, or remove it "
            "yourself"
        )


def _others(out: Path) -> list[str]:
    return sorted(
        path.name
        for path in out.iterdir()
        if (path.name != TEMPLATES if path.is_dir() else not any(fnmatch(path.name, name) for name in _OF_A_MODEL))
    )


def _others_of_a_root(out: Path) -> list[str]:
    """Raises: ValueError when `out` is one iteration of a run, in which a new root would be nested."""
    folder, _ = find_checkpoint(out)
    assert folder is not None, f"{out} is recognised, but is no Megatron checkpoint"
    if folder == out:
        raise ValueError(
            f"{out} is one iteration of a run, and a checkpoint's root is written; name the root ({out.parent}) if "
            "that is to be replaced, or write to another directory"
        )
    return sorted(path.name for path in out.iterdir() if path.name not in {TRACKER, COMPANION, folder.name})
