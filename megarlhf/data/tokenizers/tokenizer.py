"""Tokenizers: SentencePiece models and Hugging Face tokenizers behind one small protocol.

Prompts and responses are tokenized separately and their ids concatenated, in training as in rollout: a sampled response
continues ids, not text. A response is encoded as a *continuation*, without the space ("dummy prefix") that many models
put before a text's first word, so that the text is a concatenation, too: decode(encode(prompt) + encode(response,
continuation=True)) is prompt + response, and no merge crosses the border.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megarlhf.data.tokenizers.files import byte_pairs, damaged, require_readable, without_torch
from megarlhf.data.tokenizers.jinja_chat import program_of
from megarlhf.data.tokenizers.protocol import Messages, Tokenizer
from megarlhf.data.tokenizers.settings import Settings

logger = logging.getLogger(__name__)

# A protobuf message that is appended to another is merged into it, and its scalars win: field 3 of ModelProto
# (normalizer_spec, 4 bytes long), in it fields 3 (add_dummy_prefix) and 4 (remove_extra_whitespaces) = false.
_AS_CONTINUATION = b"\x1a\x04\x18\x00\x20\x00"


class SentencePieceTokenizer:
    """A SentencePiece model as a `ChatTokenizer`. Its control symbols (bos, eos, pad) cannot be written in text.

    A model that removes extra white space does so in a prompt. A continuation keeps its white space, since its leading
    space is not extra.
    """

    def __init__(self, model: bytes, name: str = "tokenizer.model", template: str | None = None) -> None:
        from sentencepiece import SentencePieceProcessor

        try:
            self._start = SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            if re.match(rb"[A-Za-z0-9+/=]+ \d+\r?\n", model):
                raise ValueError(
                    f"{name} is a file of tiktoken, not of SentencePiece; give the model's tokenizer.json, which its "
                    "Hugging Face directory has"
                ) from error
            raise ValueError(f"{name} is not a SentencePiece model: {error}; copy it again") from error
        self.name, self._template = name, template
        self.takes_white_space: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
        self._continued = SentencePieceProcessor(model_proto=model + _AS_CONTINUATION)
        self.vocab_size = int(self._start.get_piece_size())
        # SentencePiece says -1 for an id that the model does not define.
        eos_id, bos_id, pad_id = self._start.eos_id(), self._start.bos_id(), self._start.pad_id()
        self.eos_id = _required_eos(eos_id if eos_id >= 0 else None, name)
        self.bos_id: int | None = bos_id if bos_id >= 0 else None
        self.named_bos_id = self.bos_id
        self.pad_id = _pad_or_eos(pad_id if pad_id >= 0 else None, self.eos_id, name)
        self.unk_id: int | None = int(self._start.unk_id())
        self._control = {piece: n for n, piece in enumerate(self.tokens()) if self._start.is_control(n)}
        self.divides = _any_of(self._control)
        self.special_ids = frozenset(self._control.values()) | _user_defined(model)

    def own_template(self) -> str | None:
        """The template of a file beside the model, which has none itself."""
        return self._template

    def render(
        self, messages: Messages, template: str | None, variables: Mapping[str, Any], *, tools: Any, reply: bool
    ) -> str:
        """See `ChatTokenizer.render`; by jinja2 itself."""
        template = template or self._template
        assert template is not None, "see templates.chat_template"
        named = {"bos_token": self.bos_id, "eos_token": self.eos_id, "unk_token": self.unk_id}
        pieces = {name: str(self._start.id_to_piece(n)) for name, n in named.items() if n is not None and n >= 0}
        program = program_of(template)
        return program.render(messages, tools=tools, add_generation_prompt=reply, **{**pieces, **variables})

    def encode_rendered(self, text: str, *, continuation: bool = False) -> list[int]:
        """See `ChatTokenizer.encode_rendered`. The text between control symbols is ordinary text. The first stretch is
        the beginning of a text, the others are continuations."""
        parts = self.divides.split(text) if self.divides else [text]
        ids: list[int] = []
        for index, part in enumerate(parts):
            if index % 2:
                ids.append(self._control[part])
            elif part:
                ids += self.encode(part, continuation=continuation or bool(ids))
        return ids

    def marked(
        self, messages: Messages, template: str | None, variables: Mapping[str, Any], *, tools: Any
    ) -> tuple[list[int], list[bool]]:
        """See `ChatTokenizer.marked`. Raises: ValueError: the marked stretches of a text cannot be found in this
        model's pieces."""
        raise ValueError("marks of a template are read with a Hugging Face tokenizer only")

    def marked_places(
        self, messages: Messages, template: str | None, variables: Mapping[str, Any], *, tools: Any
    ) -> list[tuple[int, int]]:
        """See `marked`."""
        raise ValueError("marks of a template are read with a Hugging Face tokenizer only")

    def tokens(self) -> list[str]:
        return [str(self._start.id_to_piece(token)) for token in range(self.vocab_size)]

    def encode(self, text: str, *, continuation: bool = False) -> list[int]:
        try:
            return list((self._continued if continuation else self._start).encode(text))
        except RuntimeError:
            _require_text(text)
            raise

    def decode(self, ids: Sequence[int], *, continuation: bool = False, special: bool = False) -> str:
        model, text = self._continued if continuation else self._start, ""
        known_tokens = [token for token in ids if token < self.vocab_size]  # a model's vocabulary may be larger
        for is_named, group in itertools.groupby(known_tokens, lambda token: special and self._start.is_control(token)):
            tokens = list(group)
            text += "".join(map(self._start.id_to_piece, tokens)) if is_named else str(model.decode(tokens))
            model = self._continued
        return text


def _any_of(tokens: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern for one of several tokens, the longer one of two with the same beginning. None without tokens."""
    longest_first = sorted(filter(None, tokens), key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None


class HuggingFaceTokenizer:
    """A Hugging Face tokenizer as a `ChatTokenizer`. Special tokens written in text become their ids.

    After pickling, it encodes in the other process without transformers, which takes ten times as long to load as the
    rest. Methods that need transformers, such as those for a chat template, load it there from the same files.
    """

    def __init__(self, tokenizer: Any, name: str) -> None:
        self._whole: Any = tokenizer
        self._backend = tokenizer.backend_tokenizer if tokenizer.is_fast else None
        self._splits_special = bool(tokenizer.split_special_tokens)
        self._prepare_backend()
        self.name = name
        self.special_ids = frozenset(tokenizer.added_tokens_decoder)
        # Added tokens may leave gaps.
        self.vocab_size = max(len(tokenizer), *(token + 1 for token in self.special_ids), 0)
        self.eos_id = _required_eos(tokenizer.eos_token_id, name)
        bos_id = tokenizer.bos_token_id
        self.bos_id: int | None = _begin(tokenizer, name)
        self.named_bos_id: int | None = bos_id
        self.pad_id = _pad_or_eos(tokenizer.pad_token_id, self.eos_id, name)
        unk_id = tokenizer.unk_token_id
        self.unk_id: int | None = None if unk_id in (self.eos_id, bos_id) else unk_id  # GPT-2's is its eos
        right, left = (
            tuple(token.content for token in tokenizer.added_tokens_decoder.values() if getattr(token, side))
            for side in ("rstrip", "lstrip")
        )
        self.takes_white_space = (right, left)
        apart = (t.content for t in tokenizer.added_tokens_decoder.values() if not (t.normalized or t.single_word))
        self.divides = None if self._backend is None or self._splits_special else _any_of(apart)
        self._template: Any = None  # set by unpickling
        # A text to continue from, if the tokenizer puts a space before the first word.
        self._lead = self._encode("\n") if self._decode(self._encode("a")) != self._glued("a") else []

    def _prepare_backend(self) -> None:
        """Set the backend as transformers does before each of its calls."""
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()
            self._backend.encode_special_tokens = self._splits_special

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            backend = self._backend.to_str() if self._backend is not None else None
        except Exception:  # noqa: BLE001 - raised for parts that are written in Python
            backend = None
        if backend is None:
            return load_tokenizer, (self.name,)
        state = {**self.__dict__, "_whole": None, "_backend": backend, "_template": self.own_template()}
        return object.__new__, (type(self),), state

    def __setstate__(self, state: dict[str, Any]) -> None:
        from tokenizers import Tokenizer as FastTokenizer

        self.__dict__.update(state, _backend=FastTokenizer.from_str(state["_backend"]))
        self._prepare_backend()

    @property
    def of_transformers(self) -> Any:
        """The wrapped tokenizer of transformers."""
        if self._whole is None:
            with without_torch():
                loaded = load_tokenizer(self.name)
            assert isinstance(loaded, HuggingFaceTokenizer), "it was one in the process that has given it"
            self._whole = loaded._whole
        return self._whole

    def _encode(self, text: str) -> list[int]:
        if self._backend is None:
            return list(self.of_transformers.encode(text, add_special_tokens=False))
        # Without transformers around it, and without offsets: 1.5 times as fast on texts of a hundred tokens. One call
        # for many texts is no faster: what is made of each lies in memory until the last is done.
        try:
            (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        except TypeError:
            _require_text(text)
            raise
        return list(encoded.ids)

    def _decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        text = self.of_transformers.decode(
            list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )
        return str(text)

    def _glued(self, text: str) -> str:
        """The decoded text when its ids follow those of another text."""
        return self._decode([*self._encode("a"), *self._encode(text)])[1:]

    def tokens(self) -> list[str]:
        by_id = {token: text for text, token in self.of_transformers.get_vocab().items()}
        return [by_id.get(token, "") for token in range(self.vocab_size)]

    def encode(self, text: str, *, continuation: bool = False) -> list[int]:
        if not (continuation and self._lead):
            return self._encode(text)
        ids = self._encode("\n" + text)
        if ids[: len(self._lead)] != self._lead:
            raise ValueError(
                f"{self.name} merges a line break with {text[:40]!r}, so that the ids of the text as a "
                "continuation cannot be told; start the response with another character"
            )
        return ids[len(self._lead) :]

    def decode(self, ids: Sequence[int], *, continuation: bool = False, special: bool = False) -> str:
        if not (continuation and self._lead):
            return self._decode(ids, special=special)
        return self._decode([*self._lead, *ids], special=special)[len(self._decode(self._lead)) :]

    def own_template(self) -> str | None:
        """See `ChatTokenizer.own_template`. Of several with names, the one for tools, as in transformers."""
        template = self._template if self._whole is None else self._whole.chat_template
        if isinstance(template, dict):
            return template.get("tool_use", template.get("default"))
        return None if template is None else str(template)

    def render(
        self, messages: Messages, template: str | None, variables: Mapping[str, Any], *, tools: Any, reply: bool
    ) -> str:
        text = self.of_transformers.apply_chat_template(
            list(messages), tools, chat_template=template, tokenize=False, add_generation_prompt=reply, **variables
        )
        return str(text)

    def encode_rendered(self, text: str, *, continuation: bool = False) -> list[int]:
        return self.encode(text, continuation=continuation)

    def marked(
        self, messages: Messages, template: str | None, variables: Mapping[str, Any], *, tools: Any
    ) -> tuple[list[int], list[bool]]:
        encoding = self.of_transformers.apply_chat_template(
            list(messages),
            tools,
            chat_template=template,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **variables,
        )
        return list(encoding["input_ids"]), [bool(mark) for mark in encoding["assistant_masks"]]

    def marked_places(
        self, messages: Messages, template: str | None, variables: Mapping[str, Any], *, tools: Any
    ) -> list[tuple[int, int]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        _, places = render_jinja_template(
            [list(messages)],
            tools=tools,
            chat_template=template or self.own_template(),
            return_assistant_tokens_mask=True,
            **{**self.of_transformers.special_tokens_map, **variables},
        )
        return [(int(first), int(end)) for first, end in places[0]]


def _user_defined(model: bytes) -> frozenset[int]:
    from sentencepiece import sentencepiece_model_pb2 as schema

    proto = schema.ModelProto.FromString(model)
    kind = schema.ModelProto.SentencePiece.USER_DEFINED
    return frozenset(n for n, piece in enumerate(proto.pieces) if piece.type == kind)


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """The tokenizer of a directory: `tokenizer.json` as it is, else `tokenizer.model`, else GPT-2's `vocab.json` and
    `merges.txt` (or Megatron-LM's `gpt2-vocab.json` and `gpt2-merges.txt`), each with the settings of the small files
    beside it. A path to a file is a SentencePiece model.

    Raises: ValueError where there is none, the tokenizer needs code of the directory, a file is damaged, or no eos is
    defined
    """
    directory = Path(directory)
    if (directory / "tokenizer.json").is_file():
        from megarlhf.data.tokenizers.tokenizer_json import of_json

        with damaged(directory / "tokenizer.json"):
            tokenizer = of_json(directory)
        return HuggingFaceTokenizer(tokenizer, str(directory))
    if directory.is_dir():
        require_readable(directory)
    model = directory if directory.is_file() else directory / "tokenizer.model"
    if model.is_file():
        return _of_sentencepiece(model, alone=model == directory)
    if not directory.is_dir():
        raise ValueError(f"no such tokenizer directory: {directory}; give one that holds a tokenizer")
    if (pair := byte_pairs(directory)) is not None:
        from megarlhf.data.tokenizers.byte_pairs import of_byte_pairs

        with damaged(pair[0]):
            tokenizer = of_byte_pairs(*pair)
        return HuggingFaceTokenizer(tokenizer, str(directory))
    file_names = ", ".join(sorted(entry.name for entry in directory.iterdir())[:8]) or "nothing"
    raise ValueError(
        f"no tokenizer in {directory}: expected tokenizer.json or tokenizer.model, found {file_names}; copy the "
        "tokenizer of the model there, or GPT-2's vocab.json and merges.txt"
    )


def _of_sentencepiece(model: Path, *, alone: bool) -> Tokenizer:
    """Load a SentencePiece model. `alone`: of the files beside it only a chat template is read."""
    with damaged(model):
        template = Settings.read(model.parent).chat_template()
    pieces = SentencePieceTokenizer(model.read_bytes(), str(model), template)
    if alone:
        return pieces
    from megarlhf.data.tokenizers.sentencepiece_model import of_sentencepiece

    with damaged(model):
        tokenizer = of_sentencepiece(model)
    return pieces if tokenizer is None else HuggingFaceTokenizer(tokenizer, str(model.parent))


def first_difference(writer: Tokenizer, reader: Tokenizer) -> str | None:
    """Describe how ids of `writer` would mean something else to the model of `reader`. None if they mean the same.

    The reader may have more tokens than the writer. Padding is ignored: it is masked everywhere.
    """
    ours, theirs = writer.tokens(), reader.tokens()
    for token, text in enumerate(ours):
        if token >= len(theirs):
            return f"token {token} is {text!r} in the first; the second has {len(theirs)} tokens only"
        if text != theirs[token]:
            return f"token {token} is {text!r} in the first, {theirs[token]!r} in the second"
    for name in ("bos_id", "eos_id"):
        if (mine := getattr(writer, name)) != (other := getattr(reader, name)):
            return f"{name} is {mine} in the first, {other} in the second"
    return None


def _require_text(text: str) -> None:
    """Raises: ValueError for half of a surrogate pair, which is no character. Libraries refuse it."""
    for position, character in enumerate(text, 1):
        if "\ud800" <= character <= "\udfff":
            raise ValueError(
                f"character {position} of a text is {character!r}, half of a pair with which UTF-16 writes one: the "
                "text was cut inside it; mend it, or leave the record out"
            )


def _begin(tokenizer: Any, name: str) -> int | None:
    """The token that a tokenizer of transformers writes before a text, if any. Raises: ValueError for several."""
    text, whole = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a", add_special_tokens=True)
    places = (n for n in range(len(whole)) if text and whole[n : n + len(text)] == text)
    start = next(places, int(whole[:1] == [tokenizer.bos_token_id]))
    if start > 1:
        raise ValueError(
            f"{name} begins every text with {start} tokens ({', '.join(tokenizer.convert_ids_to_tokens(whole[:start]))}"
            "), and a text begins with one or none here; give a tokenizer whose post-processor writes one"
        )
    return int(whole[0]) if start else None


def _required_eos(eos_id: int | None, name: str) -> int:
    if eos_id is None:
        raise ValueError(f"{name} defines no end-of-sequence token, which every response needs; set one")
    return eos_id


def _pad_or_eos(pad_id: int | None, eos_id: int, name: str) -> int:
    if pad_id is None:
        logger.info("%s defines no padding token; rows are padded with eos (%d), masked as all", name, eos_id)
        return eos_id
    return pad_id
