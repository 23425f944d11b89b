"""The two files of Megatron's indexed data: tokens (.bin) and index (.idx)."""

from __future__ import annotations

from pathlib import Path


def indexed_prefix(path: str | Path) -> Path:
    """Prefix of a data set that is named by its prefix or by one of its two files."""
    text = str(path)
    return Path(text.removesuffix(".bin").removesuffix(".idx"))


def indexed_files(path: str | Path) -> tuple[Path, Path]:
    """The two files, tokens and index. Raises: ValueError where one is missing."""
    prefix = indexed_prefix(path)
    files = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    if missing := [file.name for file in files if not file.is_file()]:
        near = sorted(file.name.removesuffix(".idx") for file in prefix.parent.glob("*.idx"))
        hint = f"; {prefix.parent} has {', '.join(near[:8])}" if near else ""
        raise ValueError(
            f"{prefix}: no {' and no '.join(missing)}, which Megatron's indexed data consists of; give the path that "
            f"both begin with{hint}"
        )
    return files
