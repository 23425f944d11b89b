"""The origin of a trained model: `megarlhf.json`, which stands beside its weights and travels with copies of them.

It names the run and what the run began with. So the KL of a later run can be held to the same reference.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megarlhf.model_directory import find_hf_directory

FILE = "megarlhf.json"
Writing = Mapping[str, Mapping[str, Any]]
"""How records became tokens, by what they were read as: `{"conversations": {"template": "sha256...", "template_args":
{}, "end": 2}}`, or `{"texts": {"end": 2}}`."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """A model as a run has loaded it."""

    path: str
    digest: str
    """Digest of the tensors in `dtype`; the same for every layout and format."""
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """The making of a role's checkpoint."""

    command: str
    role: str
    run: str
    """The run directory."""
    step: int
    """Steps done."""
    update: int = 0
    """Optimizer updates done of the step after them."""
    base: Weights
    """Weights that the role began with."""
    reference: Weights | None = None
    """To which `rl` has measured the KL, or `dpo` its log-ratios."""
    adapter_of: Weights | None = None
    """The model that the role's adapter is on, which was not trained."""
    writing: Writing | None = None
    """How what it was trained on was written; None where that is not known, as of earlier versions."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Provenance:
        """Raises: ValueError, KeyError or TypeError for anything else than `to_json` has written."""
        tree: dict[str, Any] = json.loads(text)
        named = {name: tree.get(name) for name in ("reference", "adapter_of")}
        weights = {name: None if stated is None else Weights(**stated) for name, stated in named.items()}
        writing = tree.get("writing") or {}
        if not all(isinstance(each, Mapping) for each in (writing, *writing.values())):
            raise ValueError(f"writing is {writing!r}")
        return cls(**{**tree, "base": Weights(**tree["base"]), **weights})


def find_provenance_file(model: Path) -> Path | None:
    """Beside the weights of the model at `model`, or in the folder of a Megatron checkpoint with its config.json."""
    folders = [model]
    if model.exists() and (described := find_hf_directory(model)) is not None:
        folders.append(described)
    return next((folder / FILE for folder in folders if (folder / FILE).is_file()), None)


def read_provenance(model: Path) -> Provenance | None:
    """The provenance of the model at `model`; None where nothing is stated.

    Raises: ValueError when the file is damaged.
    """
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
    """Give a converted model in `folder` what is stated of the model at `model`."""
    path = find_provenance_file(model)
    if path is not None:
        shutil.copyfile(path, folder / FILE)
