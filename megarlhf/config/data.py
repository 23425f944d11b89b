"""Configuration of data: sources of records, names of their columns, and held-out parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    GetJsonSchemaHandler,
    NonNegativeInt,
    PlainSerializer,
    PositiveInt,
    model_validator,
)
from pydantic_core import CoreSchema

from megarlhf.config.conversations import ConversationConfig
from megarlhf.config.frozen import Fraction
from megarlhf.config.roles import FrozenModel, Positive

PHASES: Mapping[str, int] = {"sft": 0, "rm": 1, "dpo": 1, "rl": 2}
"""Index of the share of `data.phases` that a command reads."""

OF_TRAINING = frozenset(f"data.{key}" for key in ("validation", "test", "validation_share", "phases", "split_seed"))
"""Keys that are refused by commands that read one whole set."""


class SourceConfig(FrozenModel):
    """A set of records."""

    short_form: ClassVar[str] = "path"
    """Key that a text in place of the mapping sets."""

    kind: Literal["records", "megatron"] = "records"
    """`records`: records with texts. `megatron`: Megatron-LM's indexed data, token ids in PREFIX.bin and PREFIX.idx,
    for `sft` and `ptx`. Its `path` is the prefix, or a blend (`30 PREFIX 70 PREFIX`). Its `split` is Megatron's
    (`969,30,1`): `data.train`, `data.validation` and `data.test` read the first, second and third part; without it,
    everything."""
    path: Path
    """A file, a directory, a pattern of file names (`data/*.jsonl`), a directory of datasets' `save_to_disk`, a name of
    the Hugging Face hub, `reasoning_gym:TASK?size=500&seed=0`, or `environment:mine:Class?size=500&seed=0`."""
    subset: str | None = None
    """Configuration to read, if the README of a hub-style directory, or the hub, names several."""
    split: str | None = None
    """Split to read, if the set has several: files named for splits (`train.jsonl`, `test.jsonl`), a saved
    `DatasetDict`, a README that names them, a name of the hub. A set with several splits is refused without it."""
    columns: dict[str, str] = Field(default={})
    """Columns of the set by the names that megarlhf reads: `{prompt: question, answer: reward_model.ground_truth}`.
    Such a column is renamed. Other columns keep their names, including one that contains a renamed value."""
    adapter: str | None = None
    """Conversion of rows to records: `anthropic_hh`, `implicit_prompt`, `alpaca`, `sharegpt`, `openai_messages`, or a
    function of yours as `package.module:function`."""
    weight: Positive | None = None
    """Share of the samples that are drawn from this set, relative to the other sets of the list. Without weights the
    sets are joined: each pass over the data has every sample once."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind == "megatron" and (self.subset or self.columns or self.adapter):
            raise ValueError(
                f"kind = megatron has token ids and no columns: leave out what is set for {self.path} of subset, "
                "columns and adapter"
            )
        if self.adapter is not None and self.columns:
            raise ValueError(
                f"adapter = {self.adapter} makes the record itself, and would not see columns = {self.columns}; give "
                "one of the two"
            )
        if empty := [key for key in ("subset", "split", "adapter") if getattr(self, key) == ""]:
            raise ValueError(f"{empty[0]} is empty; name one, or leave the key out")
        return self

    @property
    def words(self) -> str:
        """Text for messages, with subset and split, which tell apart two sets of one directory."""
        parts = [f", {key} {value}" for key in ("subset", "split") if (value := getattr(self, key)) is not None]
        return f"{self.path}{''.join(parts)}"

    def short(self) -> str | dict[str, Any]:
        """Short form for a file: the path alone, or a mapping of the keys that are set."""
        given = self.model_dump(mode="json", include=set(self.changed()))
        return str(self.path) if list(given) == ["path"] else given


def describe_sources(sources: Sequence[SourceConfig]) -> str:
    """Text for messages."""
    return " + ".join(source.words for source in sources)


def _as_list(value: Any) -> Any:
    """Make a list of mappings. A text is a path, and one set needs no list."""
    given = value if isinstance(value, list | tuple) else [value]
    if value is None:
        raise ValueError("nothing is given; name a file, a directory, a pattern or a name of the hub")
    if not given:
        raise ValueError("an empty list; name one set of records at least, or leave the key out")
    sets = [{"path": item} if isinstance(item, str | Path) else item for item in given]
    return tuple(part for item in sets for part in _unblended(item))


def _unblended(value: Any) -> list[Any]:
    """The sets of a Megatron blend with their weights; other sets are returned unchanged."""
    if not isinstance(value, Mapping) or value.get("kind") != "megatron" or len(str(value.get("path", "")).split()) < 2:
        return [value]
    if value.get("weight") is not None:
        raise ValueError(f"weight = {value['weight']} beside a blend, which names its own weights; leave it out")
    named = parse_blend(str(value["path"]))
    return [{**value, "path": prefix, **({} if weight is None else {"weight": weight})} for weight, prefix in named]


def parse_blend(text: str) -> list[tuple[float | None, str]]:
    """Parse Megatron's blend: `30 PREFIX 70 PREFIX`, or prefixes alone. Like its command line, pairs of words are
    weights and prefixes if the first word of each is a number.

    Raises: ValueError if only some have a weight, or a weight is not positive.
    """
    words = text.split()
    pairs = list(zip(words[0::2], words[1::2], strict=False)) if len(words) % 2 == 0 else []
    weights = [_number(first) for first, _ in pairs]
    if not pairs or all(weight is None for weight in weights):
        return [(None, word) for word in words]
    if None in weights or min(weight or 0.0 for weight in weights) <= 0:
        raise ValueError(f"the blend {text!r}: expected a weight above 0 before each prefix, or none at all")
    return [(weight, prefix) for weight, (_, prefix) in zip(weights, pairs, strict=True)]


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _as_written(sources: tuple[SourceConfig, ...]) -> Any:
    written = [source.short() for source in sources]
    return written[0] if len(written) == 1 else written


class _EveryForm:
    """JSON schema of `Sources` for the reference: a path, a mapping, or a list of these."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        listed = handler(schema)
        return {"anyOf": [{"type": "string", "format": "path"}, listed["items"], listed]}


Sources = Annotated[
    tuple[SourceConfig, ...],
    BeforeValidator(_as_list),
    PlainSerializer(_as_written, when_used="json"),
    _EveryForm(),
]
"""One set of records, or several: a path, a mapping, or a list of these."""


def require_weights(key: str, sources: Sequence[SourceConfig]) -> None:
    """Raises: ValueError if only some sets of a list have a weight, or if a single set has one."""
    without = [source.words for source in sources if source.weight is None]
    if without and len(without) < len(sources):
        raise ValueError(
            f"{key}: {without[0]} has no weight, and others of the list have; give each one, or none: without weights "
            "the sets are joined"
        )
    if len(sources) == 1 and not without:
        raise ValueError(f"{key}: weight = {sources[0].weight:g} has no effect on one set alone; leave it out")


def require_no_weights(key: str, sources: Sequence[SourceConfig]) -> None:
    """Raises: ValueError for weights of data that is read once as a whole."""
    if weighted := [source for source in sources if source.weight is not None]:
        raise ValueError(
            f"{key}: weight = {weighted[0].weight:g} of {weighted[0].words} has no effect: every sample is read "
            "once; leave it out"
        )


class PromptDataConfig(ConversationConfig):
    train: Sources
    """Prompts. Further columns (`answer`, ...) are passed to the rule rewards."""
    validation: Sources | None = None
    """Held-out records for choices, such as the end of the run; never trained on."""
    test: Sources | None = None
    """Held-out records for final figures. No choice depends on them."""
    validation_share: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Share of the training records to set aside as `data.validation`. Records with the same prompt are all on one
    side. `split_seed` selects the records."""
    phases: str | None = None
    """Split one set of records over the commands, like DeepSpeed-Chat's `--data_split`: with `"2,4,4"` `sft` reads two
    tenths, `rm` and `dpo` four other tenths, and `rl` the last four. `split_seed` selects the records."""
    split_seed: NonNegativeInt = 0
    """Seed that selects the records of `validation_share` and `phases`. It is independent of `run.seed`."""
    cache: str | None = None
    """Directory of tokenized data, for this run and later ones; default: `$MEGARLHF_CACHE`, or `~/.cache/megarlhf`.
    `none`: in the run directory, for this run only."""
    workers: PositiveInt | None = None
    """Tokenizing processes on each node; default: one for each core that the process may use, at most 32."""
    max_prompt_tokens: PositiveInt = 1024
    """Longer prompts are skipped, counted and reported; nothing is cut."""
    max_skipped: Fraction = 0.1
    """Share of each set's records that may be skipped, for whatever reason. With more the start is refused. Rows that
    an adapter leaves out do not count."""

    @model_validator(mode="before")
    @classmethod
    def _renamed(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if old := [key for key in ("heldout", "heldout_split") if key in data]:
            raise ValueError(f"{old[0]} is now called {old[0].replace('heldout', 'validation')}; rename the key")
        return without_old_splits(data, ("train", "validation"))

    @model_validator(mode="after")
    def _check_sets(self) -> Self:
        require_weights("train", self.train)
        if not isinstance(self, SFTDataConfig) and any(source.kind == "megatron" for source in self.train):
            raise ValueError(
                "kind = megatron has token ids without prompts and responses, which sft goes on to predict, and "
                "ptx.data of rl; give records"
            )
        for key in ("validation", "test"):
            require_no_weights(key, getattr(self, key) or ())
        if self.validation_share is not None and self.validation is not None:
            raise ValueError(
                f"validation_share = {self.validation_share:g} sets training records aside, and validation = "
                f"{describe_sources(self.validation)} names others; give one of the two"
            )
        self.phase_shares()
        if self.split_seed and self.validation_share is None and self.phases is None:
            raise ValueError(
                f"split_seed = {self.split_seed} has no effect without validation_share and phases; leave it out"
            )
        return self

    def require_train_alone(self, command: str, purpose: str) -> None:
        """Raises: ValueError for keys that `command` does not read, as it reads the whole of `train` only. `purpose`:
        description of what `train` should be."""
        for key in ("validation", "test"):
            if (sources := getattr(self, key)) is not None:
                raise ValueError(
                    f"{command} reads data.train, and would leave data.{key} = {describe_sources(sources)} unread; set "
                    f"data.train to {purpose}, and leave data.{key} out"
                )
        if unread := [key for key in ("validation_share", "phases") if getattr(self, key) is not None]:
            raise ValueError(
                f"data.{unread[0]} = {getattr(self, unread[0])} is for training: {command} reads all of data.train; "
                "leave it out"
            )

    @property
    def has_validation(self) -> bool:
        """Whether there is held-out data for choices."""
        return self.validation is not None or self.validation_share is not None

    def phase_shares(self) -> tuple[float, ...] | None:
        """`phases` as shares that add up to 1. Raises: ValueError for another form."""
        if self.phases is None:
            return None
        try:
            parts = [float(part) for part in self.phases.split(",")]
        except ValueError:
            parts = []
        if len(parts) != 3 or min(parts) < 0 or not 0 < sum(parts) < float("inf"):
            raise ValueError(
                f"phases = {self.phases!r}, expected three numbers, the shares of sft, of rm and dpo, and of rl, as "
                '"2,4,4"'
            )
        return tuple(part / sum(parts) for part in parts)

    def sources(self) -> dict[str, tuple[SourceConfig, ...]]:
        """Sets of training and held-out data, by key."""
        sets = {"data.train": self.train, "data.validation": self.validation, "data.test": self.test}
        return {key: sources for key, sources in sets.items() if sources is not None}


def without_old_splits(data: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """Drop `..._split` keys of earlier versions that are null. Raises: ValueError for one that names a split."""
    old = {f"{key}_split": key for key in keys if f"{key}_split" in data}
    for name, key in old.items():
        if data[name] is not None:
            raise ValueError(
                f"{name} is now a part of {key}: write {key}: {{path: {data.get(key, '...')}, split: {data[name]}}}"
            )
    return {key: value for key, value in data.items() if key not in old}


class DataConfig(PromptDataConfig):
    train: Sources
    """Records to learn from."""
    max_response_tokens: PositiveInt = 1024
    """Longest response, including end-of-sequence. Longer ones are skipped, counted and reported; see `over_long`."""
    over_long: Literal["drop", "cut"] = "drop"
    """Handling of a response longer than `max_response_tokens`. `drop`: skip the record. `cut`, for `sft` only: cut its
    end off, including end-of-sequence, so that no ending is learnt there; with `loss_on: all` the conversation is cut,
    at `max_prompt_tokens` + `max_response_tokens`. Both are counted. A prompt that is too long is always skipped."""

    def require_no_cut(self, command: str) -> None:
        """Raises: ValueError for `over_long: cut` in a command that compares whole responses."""
        if self.over_long == "cut":
            raise ValueError(
                f"data.over_long = cut is for sft: {command} compares whole responses, and the reason of a preference "
                "may be in the part that is cut; leave it out"
            )


class SFTDataConfig(DataConfig):
    loss_on: Literal["last", "all"] = "last"
    """Messages of the assistant that are learnt. `last`: the last one of a conversation, the rest is the prompt. `all`:
    every one; the limit of a conversation is then `max_prompt_tokens` + `max_response_tokens`."""
    sequence_length: Annotated[int, Field(ge=1)] | None = None
    """For sets of kind `megatron`: learnt tokens of a sample, like Megatron's --seq-length. A sample has one token
    more, and all must fit the model's positions. Default: `max_prompt_tokens` + `max_response_tokens` - 1."""

    @model_validator(mode="after")
    def _check_sequence_length(self) -> Self:
        indexed = [source for sources in self.sources().values() for source in sources if source.kind == "megatron"]
        if self.sequence_length is not None and not indexed:
            raise ValueError(
                f"sequence_length = {self.sequence_length} is for sets with kind = megatron, and there is none; leave "
                "it out"
            )
        return self

    @property
    def indexed_length(self) -> int:
        """`sequence_length`, or its default."""
        return self.sequence_length or self.max_prompt_tokens + self.max_response_tokens - 1
