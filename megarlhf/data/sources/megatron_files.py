"""The two files of Megatron's indexed data: tokens (.bin) and index (.idx)."""

from __future__ import annotations

from pathlib import Path


def prefix_of(path: str | Path) -> Path:
    """Of a data set that is named by its prefix, or by one of its two files."""
    text = str(path)
    return Path(text.removesuffix(".bin").removesuffix(".idx"))


def files_of(path: str | Path) -> tuple[Path, Path]:
    """The two files, tokens and index. Raises: ValueError where one is not there."""
    prefix = prefix_of(path)
    files = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    if missing := [file.name for file in files if not file.is_file()]:
        near = (
            sorted(file.name.removesuffix(".idx") for file in prefix.parent.glob("*.idx"))
            if prefix.parent.is_dir()
            else []
        )
        hint = f"; {prefix.parent} has {', '.join(near[:8])}" if near else ""
        raise ValueError(
            f"{prefix}: no {' and no '.join(missing)}, which Megatron's indexed data consists of; give the path that "
            f"both begin with{hint}"
        )
    return files
