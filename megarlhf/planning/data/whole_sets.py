"""Check of all records in a dry run: small sets are tokenized whole, as in the run, and kept for it. So all of the
run's refusals are raised."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
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
from megarlhf.data.tokenize.load import SetLoader, hub_revision
from megarlhf.planning.data.encoders import AnyEncoder, indexed_options, sets_of
from megarlhf.planning.machine.capabilities import AnyConfig

WHOLE_MIB = 32
"""Size of a set's files up to which all records are checked. Of larger sets only the first rows are."""
_SAMPLES: Mapping[type, type] = {
    SFTEncoder: SFTSample, PairEncoder: PairSample, PromptEncoder: PromptSample, TextEncoder: Text
}  # fmt: skip


def look_at_all_records(command: str, cfg: AnyConfig) -> list[str]:
    """Read all records of small sets. Returns notes on skipped records and on sets that were not read. Raises:
    ValueError as the run."""
    notes: list[str] = []
    with _cache(cfg.data) as data:
        whole = True
        for key, sources, encoder in sets_of(cfg):
            for source in sources:
                if reason := _too_large(source):
                    notes.append(f"{key} = {source.words}: {reason}, so that only its first records were looked at")
                else:
                    notes += _notes_on_set(cfg, data, key, source, encoder)
                whole &= not reason
        if whole and isinstance(cfg, SFTConfig | RMConfig | DPOConfig | RLConfig):
            _, _, of_shares = _loader(cfg, data, sets_of(cfg)[0][2]).train_and_validation(command)
            notes += [note for note in of_shares if not any(note in other for other in notes)]
    return notes


def _too_large(source: SourceConfig) -> str:
    """The reason for not reading all records. "" where they are read."""
    if source.kind == "megatron":
        return ""
    found_source = find(source)
    if found_source.kind == "hub":
        hub_revision(source)
        return "it is a data set of the hub"
    if found_source.kind == "generated":
        return "it is generated"
    size = sum(file.stat().st_size for file in _files(found_source)) / 2**20
    return f"it has {size:.0f} MiB, and a dry run reads up to {WHOLE_MIB} MiB whole" if size > WHOLE_MIB else ""


def _files(found_source: FoundSource) -> list[Path]:
    return [file for path in found_source.files for file in ([path] if path.is_file() else path.rglob("*"))]


@contextlib.contextmanager
def _cache(data: PromptDataConfig) -> Iterator[Any]:
    """The section with the run's cache, or with a temporary one where the run's would be in its directory."""
    if data.cache != PRIVATE:
        yield data
        return
    with tempfile.TemporaryDirectory(prefix="megarlhf-data-") as directory:
        yield data.model_copy(update={"cache": directory})


def _loader(cfg: AnyConfig, data: PromptDataConfig, encoder: AnyEncoder) -> SetLoader[Any]:
    """The run's loader of a set."""
    fields = ("text",) if isinstance(encoder, TextEncoder) else ()
    indexed = indexed_options(cfg) if isinstance(cfg, SFTConfig | RLConfig) else None
    return SetLoader(data, encoder, _SAMPLES[type(encoder)], fields, indexed=indexed)


def _notes_on_set(
    cfg: AnyConfig, data: PromptDataConfig, key: str, source: SourceConfig, encoder: AnyEncoder
) -> list[str]:
    """Notes on a set, all of which is read. Raises: ValueError."""
    part, notes = key.removeprefix("data."), list[str]()
    try:
        samples = _loader(cfg, data, encoder).stored(source, notes, part if part in PARTS else "train")
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None
    if isinstance(cfg, SFTConfig | RMConfig | DPOConfig):
        role = cfg.reward_model if isinstance(cfg, RMConfig) else cfg.actor
        require_fitting(
            samples,
            (("tokens",),) if isinstance(cfg, SFTConfig) else PAIR_SEQUENCES,
            positions=architecture_from_hf(role.model.hf_directory()).longest_sequence,
            model=str(role.model.path),
            budget=cfg.train.max_tokens_per_micro_batch,
            source=source.words,
            parts="prompt and response" if isinstance(cfg, SFTConfig) else "prompt and response, both answers together",
        )
    return [f"{key}, all records: {note}" for note in notes]
