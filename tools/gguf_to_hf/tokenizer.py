"""A GGUF file's tokenizer as a tokenizer.json of Hugging Face.

A GGUF file has the tokens, the merges and a word for the way in which text is cut before merges apply
(`tokenizer.ggml.pre`): what that word means stands in llama.cpp's code, and here for the families that are known. With
another cut a model would read other tokens, so an unknown word is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarlhf.data.tokenizers.pieces import fast_tokenizer
from tools.gguf_to_hf.header import GGUFFile

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How a byte-level tokenizer reads text before its merges."""

    pattern: str | None = None
    """Pieces; None: GPT-2's."""
    single_digits: bool = False
    """Before anything else, each digit is a piece."""
    composed: bool = False
    """Text is brought into Unicode's NFC first."""
    whole_first: bool = False
    """A piece that is a token is that token, whatever its merges would make of it."""
    starts_with_bos: bool = False
    """Where the file does not say whether texts begin with bos."""


_OF_LLAMA3 = Cut(pattern=_LLAMA3, whole_first=True, starts_with_bos=True)
CUTS: Mapping[str, Cut] = {
    "gpt-2": Cut(),
    "smollm": Cut(single_digits=True),
    "qwen2": Cut(pattern=_QWEN2, composed=True),
    "llama-bpe": _OF_LLAMA3,
    "llama-v3": _OF_LLAMA3,
    "llama3": _OF_LLAMA3,
}
"""By `tokenizer.ggml.pre`."""

NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
"""Types of tokens: pieces of text, what stands for none of them, marks, what is matched whole, and what only fills the
vocabulary up."""
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Of a text, of a turn, of a message: each ends a response."""


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """What stands beside a model's weights so that text becomes its tokens."""

    contents: Mapping[str, bytes]
    """By file."""
    tokens: Sequence[str]
    """By id, without those that only fill the vocabulary up."""
    bos_id: int | None
    pad_id: int | None
    end_ids: tuple[int, ...]
    """The end-of-sequence token first."""
    backend: Any
    """The `tokenizers.Tokenizer` that was written; None for a directory's own tokenizer."""
    notes: tuple[str, ...] = ()
    """What could not be known, in sentences."""


def tokenizer_files(file: GGUFFile, vocab_size: int) -> TokenizerFiles:
    """Raises: ValueError when the file has no tokenizer, a kind that is not known, or one that contradicts itself."""
    read = _Vocabulary(file)
    if len(read.types) > vocab_size:
        raise ValueError(f"{file.path} has {len(read.types)} tokens and an embedding of {vocab_size}; copy it again")
    kind = read.kind
    if kind is None or kind not in _BUILDERS:
        raise ValueError(
            f"{file.path} has a tokenizer of kind {kind!r} (tokenizer.ggml.model), known: {', '.join(_BUILDERS)}; "
            f"{_OTHER_TOKENIZER}"
        )
    try:
        backend = _BUILDERS[kind](read)
    except ValueError:
        raise
    except Exception as error:  # what tokenizers raises is of no narrower class
        raise ValueError(f"{file.path}: its tokenizer cannot be made ({error}); copy it again") from error
    bos, eos = read.special("bos_token_id"), read.special("eos_token_id")
    if eos is None:
        raise ValueError(
            f"{file.path} names no end-of-sequence token (tokenizer.ggml.eos_token_id), which every response needs; "
            f"{_OTHER_TOKENIZER}"
        )
    contents = {
        "tokenizer.json": backend.to_str(pretty=True).encode(),
        "tokenizer_config.json": _text(read.config(file.metadata)),
        **chat_templates(file),
    }
    ends = [read.special(name) for name in ENDS]
    return TokenizerFiles(
        contents=contents,
        tokens=read.tokens,
        bos_id=bos,
        pad_id=read.special("padding_token_id"),
        end_ids=tuple(dict.fromkeys(token for token in ends if token is not None)),
        backend=backend,
        notes=(_OF_SENTENCE_PIECES,) if kind == "llama" else (),
    )


_OTHER_TOKENIZER = "name a directory that has the model's own tokenizer: --tokenizer DIR"
_OF_SENTENCE_PIECES = (
    "the tokenizer puts a space behind a special token, as Llama 2's and llama.cpp do; a GGUF file does not say "
    "whether the model's own does: --tokenizer DIR takes that"
)


def chat_templates(file: GGUFFile) -> dict[str, bytes]:
    """By file: the one, and those with names."""
    templates = {}
    for key, value in file.metadata.items():
        if not (key == "tokenizer.chat_template" or key.startswith("tokenizer.chat_template.")):
            continue
        if not isinstance(value, str):
            raise ValueError(f"{file.path} has {key} = {value!r}, expected a text; it is damaged: copy it again")
        if key == "tokenizer.chat_template":
            templates["chat_template.jinja"] = value.encode()
        else:
            name = key.removeprefix("tokenizer.chat_template.")
            if not name.replace("_", "").replace("-", "").isalnum():
                raise ValueError(f"{file.path} has a chat template named {name!r}, which is no file's name")
            templates[f"additional_chat_templates/{name}.jinja"] = value.encode()
    return templates


def _text(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


class _Vocabulary:
    """The metadata of a tokenizer, checked."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        tokens, types = self.get("tokens", list, None), self.get("token_type", list, None)
        self.kind: str | None = self.get("model", str, None)
        if not tokens or self.kind in (None, "none", "no_vocab"):
            raise ValueError(f"{file.path} has no tokenizer; {_OTHER_TOKENIZER}")
        if types is None or len(types) != len(tokens):
            raise ValueError(
                f"{file.path} has {len(tokens)} tokens and {'no' if types is None else len(types)} types of them "
                f"(tokenizer.ggml.token_type), so that special tokens cannot be told; {_OTHER_TOKENIZER}"
            )
        self.types: list[int] = types
        used = len(tokens)
        while used and types[used - 1] == UNUSED:
            used -= 1
        self.tokens: list[str] = tokens[:used]
        self.ids = {token: number for number, token in enumerate(self.tokens)}
        if len(self.ids) != used:
            again = next(token for number, token in enumerate(self.tokens) if self.ids[token] != number)
            raise ValueError(f"{file.path} has the token {again!r} twice; {_OTHER_TOKENIZER}")

    def get(self, name: str, kind: type, default: Any) -> Any:
        value = self.file.metadata.get(f"tokenizer.ggml.{name}", default)
        if value is not default and type(value) is not kind:
            raise ValueError(
                f"{self.file.path} has tokenizer.ggml.{name} = {value!r}, expected {kind.__name__}; copy it again"
            )
        return value

    def special(self, name: str) -> int | None:
        token: int | None = self.get(name, int, None)
        if token is not None and not 0 <= token < len(self.tokens):
            raise ValueError(
                f"{self.file.path} has tokenizer.ggml.{name} = {token}, and {len(self.tokens)} tokens; copy it again"
            )
        return token

    def name(self, key: str) -> str | None:
        token = self.special(key)
        return None if token is None else self.tokens[token]

    def config(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """tokenizer_config.json. The class is the one that transformers 4 and 5 both read tokenizer.json with."""
        names = {
            "bos_token": self.name("bos_token_id"),
            "eos_token": self.name("eos_token_id"),
            "unk_token": self.name("unknown_token_id"),
            "pad_token": self.name("padding_token_id"),
        }
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{key: name for key, name in names.items() if name is not None},
            "clean_up_tokenization_spaces": False,
            "model_max_length": metadata.get(f"{self.file.architecture}.context_length"),
        }

    def add_special(self, tokenizer: Any) -> None:
        from tokenizers import AddedToken

        for number, (token, kind) in enumerate(zip(self.tokens, self.types, strict=False)):
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED):
                tokenizer.add_tokens([AddedToken(token, normalized=False, special=kind != _USER_DEFINED)])
                assert tokenizer.token_to_id(token) == number, f"{token} is no token of the vocabulary"

    def around(self, *, bos: bool) -> tuple[str, str]:
        """The tokens that begin and end a text; "" for none. bos: where the file does not say.

        Raises: ValueError for a text that is to begin or end with a token that is not named.
        """
        found = []
        for flag, key, default in (("add_bos_token", "bos_token_id", bos), ("add_eos_token", "eos_token_id", False)):
            name = self.name(key) if self.get(flag, bool, default) else ""
            if name is None and self.get(flag, bool, None):
                raise ValueError(f"{self.file.path} says tokenizer.ggml.{flag}, and names no {key}; copy it again")
            found.append(name or "")
        return found[0], found[1]

    def post_processor(self, *, bos: bool) -> Any:
        """Puts `around` around texts; None without either."""
        from tokenizers.processors import TemplateProcessing

        start, end = self.around(bos=bos)
        if not (start or end):
            return None
        special = [(token, self.ids[token]) for token in dict.fromkeys(filter(None, (start, end)))]
        single, second = ([*filter(None, (start, text, end))] for text in ("$A", "$B"))
        pair = " ".join([*single, *(f"{part}:1" for part in second)])
        return TemplateProcessing(single=" ".join(single), pair=pair, special_tokens=special)


def _byte_level(read: _Vocabulary) -> Any:
    """`gpt2`: pairs of bytes."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    word = read.get("pre", str, None)
    if word not in CUTS:
        said = "does not say" if word is None else f"says {word!r}, which is not known here,"
        raise ValueError(
            f"{read.file.path} {said} how its tokenizer cuts text before merging (tokenizer.ggml.pre); known: "
            f"{', '.join(CUTS)}; {_OTHER_TOKENIZER}"
        )
    cut, merges = CUTS[word], [tuple(merge.split(" ")) for merge in read.get("merges", list, [])]
    if not merges or any(len(pair) != 2 for pair in merges):
        raise ValueError(f"{read.file.path} has no sound tokenizer.ggml.merges; copy it again")
    tokenizer = Tokenizer(models.BPE(vocab=read.ids, merges=merges, ignore_merges=cut.whole_first))
    if cut.composed:
        tokenizer.normalizer = normalizers.NFC()
    pieces: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if cut.single_digits else []
    if cut.pattern is not None:
        pieces.append(pre_tokenizers.Split(Regex(cut.pattern), behavior="isolated"))
    pieces.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(pieces)
    tokenizer.decoder = decoders.ByteLevel()
    around = read.post_processor(bos=cut.starts_with_bos)
    offsets = processors.ByteLevel(trim_offsets=False)
    tokenizer.post_processor = offsets if around is None else processors.Sequence([offsets, around])
    read.add_special(tokenizer)
    return tokenizer


def _sentence_pieces(read: _Vocabulary) -> Any:
    """`llama`: SentencePiece's pairs, with bytes for what has no piece. As Llama 2's tokenizer.json: a space is put
    before a text, and before what follows a special token, unless the file says otherwise."""
    from tokenizers import processors

    if read.file.architecture == "phi3":
        raise ValueError(
            f"{read.file.path} is a Phi-3, whose tokenizer drops the white space behind <|user|>, <|end|> and other "
            f"tokens, and a GGUF file does not say which; {_OTHER_TOKENIZER}"
        )
    for key, wanted in (("remove_extra_whitespaces", False), ("precompiled_charsmap", [])):
        if read.file.metadata.get(f"tokenizer.ggml.{key}", wanted) != wanted:
            raise ValueError(
                f"{read.file.path} has a tokenizer that changes text before it reads it (tokenizer.ggml.{key}), which "
                f"is not carried over; {_OTHER_TOKENIZER}"
            )
    scores = read.get("scores", list, None)
    if scores is None or len(scores) < len(read.tokens):
        raise ValueError(f"{read.file.path} has no tokenizer.ggml.scores of all its tokens; copy it again")
    tokenizer = fast_tokenizer(
        read.ids,
        scores,
        {number for number in read.ids.values() if read.types[number] == NORMAL},
        unknown=read.name("unknown_token_id"),
        prefix=read.get("add_space_prefix", bool, True),
    )
    tokenizer.post_processor = read.post_processor(bos=True) or processors.TemplateProcessing(
        single="$A", pair="$A $B:1", special_tokens=[]
    )
    read.add_special(tokenizer)
    return tokenizer


_BUILDERS: Mapping[str, Callable[[_Vocabulary], Any]] = {"gpt2": _byte_level, "llama": _sentence_pieces}
"""By `tokenizer.ggml.model`."""
