"""The package's source text, for tests that read it."""

from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "megarlhf"


def sources() -> dict[str, str]:
    """Every module of the package by its path."""
    files = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    assert len(files) > 50, "the package was not read"
    return files


def is_in(file: str, places: tuple[str, ...]) -> bool:
    return any(file == place or (place.endswith("/") and file.startswith(place)) for place in places)
