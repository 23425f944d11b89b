"""Data beyond the first rows in a dry run: small sets are tokenized whole, as the run will do it, and kept
for the run, so that all of its refusals are told."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarlhf.architectures.hf_config import architecture_from_hf
from megarlhf.config import DPOConfig, PromptDataConfig, RLConfig, RMConfig, SFTConfig, SourceConfig
from megarlhf.data.sample_types import PAIR_SEQUENCES, PairSample, PromptSample, SFTSample
from megarlhf.data.samples.encoders import PairEncoder, PromptEncoder, SFTEncoder
from megarlhf.data.samples.limits import require_fitting
from megarlhf.data.samples.megatron_indexed import PARTS
from megarlhf.data.samples.texts import Text, TextEncoder
from megarlhf.data.sources.find import FoundSource, find
from megarlhf.data.tokenize.cache import PRIVATE
from megarlhf.data.tokenize.load import SetLoader
from megarlhf.planning.data.encoders import AnyEncoder, indexed_options, sets_of
from megarlhf.planning.machine.capabilities import AnyConfig

WHOLE_MIB = 32
"""Size of the files of a set up to which all records are looked at; of larger ones the first rows."""
_SAMPLES: Mapping[type, type] = {
    SFTEncoder: SFTSample, PairEncoder: PairSample, PromptEncoder: PromptSample, TextEncoder: Text
}  # fmt: skip


@dataclass(frozen=True)
class _Look:
    """At one set."""

    key: str
    source: SourceConfig
    encoder: AnyEncoder


def look_at_all_records(command: str, cfg: AnyConfig) -> list[str]:
    """Returns what was read, what was skipped, and what was not looked at, in sentences. Raises: ValueError as the
    run."""
    notes: list[str] = []
    with _cache(cfg.data) as data:
        whole = True
        for key, given, encoder in sets_of(cfg):
            for source in given:
                if words := _too_large(source):
                    notes.append(f"{key} = {source.words}: {words}, so that only its first records were looked at")
                else:
                    notes += _looked_at(cfg, data, _Look(key, source, encoder))
                whole &= not words
        if whole and isinstance(cfg, SFTConfig | RMConfig | DPOConfig | RLConfig):
            _, _, of_shares = _loader(cfg, data, sets_of(cfg)[0][2]).train_and_validation(command)
            notes += [note for note in of_shares if not any(note in other for other in notes)]
    return notes


def _too_large(source: SourceConfig) -> str:
    """Why not all records are looked at; "" where they are."""
    if source.kind == "megatron":
        return ""
    place = find(source)
    if place.kind in ("hub", "generated"):
        return "it is generated" if place.kind == "generated" else "it is not on disk"
    size = sum(file.stat().st_size for file in _files(place)) / 2**20
    return f"it has {size:.0f} MiB, and a dry run reads up to {WHOLE_MIB} MiB whole" if size > WHOLE_MIB else ""


def _files(place: FoundSource) -> list[Path]:
    return [file for each in place.files for file in ([each] if each.is_file() else each.rglob("*"))]


@contextlib.contextmanager
def _cache(data: PromptDataConfig) -> Iterator[Any]:
    """The section with the run's cache; where that would be in the run directory, with one that is removed again."""
    if data.cache != PRIVATE:
        yield data
        return
    with tempfile.TemporaryDirectory(prefix="megarlhf-data-") as place:
        yield data.model_copy(update={"cache": place})


def _loader(cfg: AnyConfig, data: PromptDataConfig, encoder: AnyEncoder) -> SetLoader[Any]:
    """Loader of a set, as the run has it."""
    fields = ("text",) if isinstance(encoder, TextEncoder) else ()
    indexed = indexed_options(cfg) if isinstance(cfg, SFTConfig | RLConfig) else None
    return SetLoader(data, encoder, _SAMPLES[type(encoder)], fields, indexed=indexed)


def _looked_at(cfg: AnyConfig, data: PromptDataConfig, look: _Look) -> list[str]:
    """Raises: ValueError."""
    part, notes = look.key.removeprefix("data."), list[str]()
    try:
        samples = _loader(cfg, data, look.encoder).stored(look.source, notes, part if part in PARTS else "train")
    except ValueError as error:
        raise ValueError(f"{look.key}: {error}") from None
    if isinstance(cfg, SFTConfig | RMConfig | DPOConfig):
        role = cfg.reward_model if isinstance(cfg, RMConfig) else cfg.actor
        require_fitting(
            samples,
            (("tokens",),) if isinstance(cfg, SFTConfig) else PAIR_SEQUENCES,
            positions=architecture_from_hf(role.model.hf_directory()).longest_sequence,
            model=str(role.model.path),
            budget=cfg.train.max_tokens_per_micro_batch,
            source=look.source.words,
            words="prompt and response" if isinstance(cfg, SFTConfig) else "prompt and response, both answers together",
        )
    return [f"{look.key}, all records: {note}" for note in notes]
