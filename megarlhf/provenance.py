"""Origin of a trained model: `megarlhf.json`, which is written beside its weights and copied with them.

It names the run and the weights with which the run began, so that a later run can measure its KL to the same reference.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megarlhf.model_directory import find_hf_directory, find_part

FILE = "megarlhf.json"
Writing = Mapping[str, Mapping[str, Any]]
"""The way in which records became tokens, by kind of record: `{"conversations": {"template": "sha256...",
"template_args": {}, "end": 2}}`, or `{"texts": {"end": 2}}`."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """A model as a run loaded it."""

    path: str
    digest: str
    """Digest of the tensors in `dtype`; the same for every layout and format."""
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Origin of a role's checkpoint."""

    command: str
    role: str
    run: str
    """The run directory."""
    step: int
    """Steps done."""
    update: int = 0
    """Optimizer updates done of the next step."""
    base: Weights
    """Weights with which the role began."""
    reference: Weights | None = None
    """Reference of the KL in `rl`, or of the log-ratios in `dpo`."""
    adapter_of: Weights | None = None
    """Model below the role's adapter, which was not trained."""
    writing: Writing | None = None
    """The way in which its training data became tokens; None if unknown, as in files of earlier versions."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Provenance:
        """Read the output of `to_json`. Raises: ValueError, KeyError or TypeError for any other text."""
        tree: dict[str, Any] = json.loads(text)
        optional = {name: tree.get(name) for name in ("reference", "adapter_of")}
        weights = {name: None if values is None else Weights(**values) for name, values in optional.items()}
        writing = tree.get("writing") or {}
        if not all(isinstance(part, Mapping) for part in (writing, *writing.values())):
            raise ValueError(f"writing is {writing!r}")
        return cls(**{**tree, "base": Weights(**tree["base"]), **weights})


def find_provenance_file(model: Path) -> Path | None:
    """File beside the weights of the model at `model`, or in the folder with its config.json."""
    folders = [model, find_part(model)]
    if model.exists() and (described := find_hf_directory(model)) is not None:
        folders.append(described)
    return next((folder / FILE for folder in folders if (folder / FILE).is_file()), None)


def read_provenance(model: Path) -> Provenance | None:
    """Provenance of the model at `model`; None without a file. Raises: ValueError if the file is damaged."""
    path = find_provenance_file(model)
    if path is None:
        return None
    try:
        return Provenance.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} does not say where the model comes from ({type(error).__name__}: {error}); copy it again from the "
            "checkpoint, or remove it if the model is none that megarlhf has trained"
        ) from None


def carry_provenance(model: Path, folder: Path) -> None:
    """Copy the provenance of the model at `model` to a converted model in `folder`."""
    path = find_provenance_file(model)
    if path is not None:
        shutil.copyfile(path, folder / FILE)
