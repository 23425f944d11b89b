"""Small tokenizers that are read as published ones have to be, each with the fault that was found with those. Found by
`make test-published` and in reports of others; the tokenizers are trained here."""

import io
import json
import logging
import pickle
import shutil
from pathlib import Path

import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from megarlhf.config import ConversationConfig, ModelConfig
from megarlhf.data.text.export_files import export_files
from megarlhf.data.tokenizers.comparison import transformers_difference
from megarlhf.data.tokenizers.files import has_tokenizer
from megarlhf.data.tokenizers.sample_texts import TEXTS
from megarlhf.data.tokenizers.tokenizer import load_tokenizer
from megarlhf.weights.checkpoint.hf_writer import other_files
from tests.published.texts import draw, write_config
from tests.refuses import missing_names, refuses

CORPUS = ["a small red boat", "two birds sing over the sea", "three and 1234 of don't\n\n"] * 30
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Not Qwen's, which takes digits one by one."""
DRAWN = draw(100)


def byte_level(*special: str, expression: str | None = None, begin: str | None = None) -> Tokenizer:
    """Pairs of bytes; texts cut by an expression, else as GPT-2's."""
    from tokenizers import Regex

    made = Tokenizer(models.BPE())
    cut = [] if expression is None else [pre_tokenizers.Split(Regex(expression), "isolated")]
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not cut)
    made.pre_tokenizer = pre_tokenizers.Sequence([*cut, whole])
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(CORPUS, trainer)
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    if begin is not None:
        ids = [(begin, made.token_to_id(begin))]
        made.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=ids)
    return made


def write(directory: Path, file: Tokenizer | None, model_type: str = "llama", **settings: object) -> Path:
    write_config(directory, model_type)
    if file is not None:
        (directory / "tokenizer.json").write_text(file.to_str())
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
CLASSES = ("LlamaTokenizerFast", "LlamaTokenizer", "Qwen2Tokenizer", "GPT2Tokenizer", "PreTrainedTokenizerFast", None)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "mistral", "phi3", "gpt2"])
def test_ids_are_the_file_s_whatever_class_is_named_beside_whatever_model(model_type, tmp_path):
    """In workers too. transformers reads some of these pairs otherwise (see below)."""
    file = byte_level("<s>", "</s>", expression=LLAMA3)
    for name in CLASSES:
        stated = NAMES if name is None else {**NAMES, "tokenizer_class": name}
        tokenizer = load_tokenizer(write(tmp_path, file, model_type, **stated))
        worker = pickle.loads(pickle.dumps(tokenizer))
        for text in (*TEXTS, *DRAWN, "a<s> b </s>\nc"):
            ids = file.encode(text, add_special_tokens=False).ids
            assert tokenizer.encode(text) == worker.encode(text) == ids
            assert tokenizer.decode(ids) == text.replace("<s>", "").replace("</s>", "")
        assert (tokenizer.eos_id, tokenizer.vocab_size) == (file.token_to_id("</s>"), file.get_vocab_size())


def test_what_transformers_reads_otherwise_is_told_and_mended_in_exports(tmp_path):
    """LlamaTokenizer's parts over a byte-level file drop the spaces; the class in an export lets them stand."""
    settings = {**NAMES, "tokenizer_class": "LlamaTokenizerFast", "chat_template": "{{ messages }}"}
    model = write(tmp_path / "model", byte_level("<s>", "</s>"), **settings)
    tokenizer = load_tokenizer(model)
    other = transformers_difference(model, tokenizer)
    assert not missing_names(other or "", "LlamaTokenizer", "other ids")
    export = shutil.copytree(model, tmp_path / "export")
    assert AutoTokenizer.from_pretrained(export).encode("a b") != tokenizer.encode("a b")
    files = export_files(ModelConfig(path=model), ConversationConfig(template="plain"), ())
    for name, content in files.items():
        (export / name).write_bytes(content)
    theirs = AutoTokenizer.from_pretrained(export)
    assert [theirs.encode(text) for text in DRAWN] == [tokenizer.encode(text) for text in DRAWN]
    assert (theirs.eos_token_id, theirs.chat_template) == (tokenizer.eos_id, "{{ messages }}")
    right = write(tmp_path / "right", byte_level("<s>", "</s>"), **NAMES, tokenizer_class="PreTrainedTokenizerFast")
    assert transformers_difference(right, load_tokenizer(right)) is None
    assert export_files(ModelConfig(path=right), ConversationConfig(template="plain"), ()) == {}


@pytest.mark.parametrize("name, stated, in_file, writes", [
    ("LlamaTokenizerFast", True, False, True),  # DeepSeek
    ("LlamaTokenizerFast", False, True, False), ("LlamaTokenizerFast", None, True, True),  # Llama 3
    ("LlamaTokenizerFast", None, False, False), ("GemmaTokenizer", True, False, True),
    ("PreTrainedTokenizerFast", True, False, False), ("PreTrainedTokenizerFast", False, True, True),
    ("Qwen2Tokenizer", False, True, True),
])  # fmt: skip
def test_a_text_begins_as_transformers_4_began_it(name, stated, in_file, writes, tmp_path, caplog):
    """By `add_bos_token` with the classes that read it, else by the file. Values are transformers 4.57's."""
    caplog.set_level(logging.INFO)
    file = byte_level("<s>", "</s>", begin="<s>" if in_file else None)
    settings = {**NAMES, "tokenizer_class": name} | ({} if stated is None else {"add_bos_token": stated})
    tokenizer = load_tokenizer(write(tmp_path, file, **settings))
    assert tokenizer.bos_id == (file.token_to_id("<s>") if writes else None)
    assert ("tokenizer.json says otherwise" in caplog.text) is (writes != in_file)
    assert tokenizer.of_transformers("a").input_ids == [file.token_to_id("<s>")] * writes + tokenizer.encode("a")


def test_several_tokens_before_a_text_are_refused(tmp_path):
    """As those of GLM."""
    file = byte_level("[gMASK]", "<sop>", "</s>")
    special = [(token, file.token_to_id(token)) for token in ("[gMASK]", "<sop>")]
    file.post_processor = processors.TemplateProcessing(single="[gMASK] <sop> $A", special_tokens=special)
    with refuses("2 tokens", "[gMASK], <sop>"):
        load_tokenizer(write(tmp_path, file, eos_token="</s>"))


@pytest.fixture(scope="module")
def sentence_pieces():
    """Its pieces of white space have the lowest scores, as Mistral's: what they stand before is joined first."""
    buffer = io.BytesIO()
    options = {"model_type": "bpe", "byte_fallback": True, "vocab_size": 340, "hard_vocab_limit": False}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=buffer, normalization_rule_name="identity",
        remove_extra_whitespaces=False, minloglevel=2, **options,
    )  # fmt: skip
    proto = sentencepiece_model_pb2.ModelProto.FromString(buffer.getvalue())
    spaces = proto.pieces.add()
    spaces.piece, spaces.score, spaces.type = "▁▁", -1e9, proto.SentencePiece.NORMAL
    first = next(n for n, piece in enumerate(proto.pieces) if piece.type == proto.SentencePiece.NORMAL)
    moved = [proto.SentencePiece.FromString(piece.SerializeToString()) for piece in proto.pieces]
    del proto.pieces[:]
    proto.pieces.extend([*moved[:first], moved[-1], *moved[first:-1]])
    return proto.SerializeToString()


CHATML = {"bos_token": "<s>", "eos_token": "<|im_end|>", "unk_token": "<unk>", "tokenizer_class": "LlamaTokenizer"}
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_sentence_pieces_with_added_tokens_and_ends(sentence_pieces, model_type, tmp_path):
    """ChatML fine-tunes. Pieces are SentencePiece's; transformers 5 joins them by their ids, or drops a space."""
    alone = sentencepiece.SentencePieceProcessor(model_proto=sentence_pieces)
    size = alone.get_piece_size()
    directory = write(tmp_path, None, model_type, **CHATML, chat_template=TEMPLATE)
    (directory / "tokenizer.model").write_bytes(sentence_pieces)
    (directory / "added_tokens.json").write_text(json.dumps({"<|im_end|>": size, "<|im_start|>": size + 1}))
    tokenizer = load_tokenizer(directory)
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.bos_id) == (size + 2, size, alone.bos_id())
    for text in (*TEXTS, *DRAWN, " a  b"):
        assert tokenizer.encode(text) == alone.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    marked = tokenizer.encode("<|im_start|>a boat<|im_end|>")
    assert marked == [size + 1, *alone.encode("a boat"), size]
    assert tokenizer.own_template() == TEMPLATE
    assert pickle.loads(pickle.dumps(tokenizer)).encode("<|im_start|>a") == marked[:2]
    theirs = AutoTokenizer.from_pretrained(directory)
    assert theirs.encode("a  boat", add_special_tokens=False) != alone.encode("a  boat"), "transformers is mended"
    assert (theirs.eos_token_id, len(theirs)) == (size, size + 2)
    exported = export_files(ModelConfig(path=directory), ConversationConfig(template="plain"), ())
    for name, content in exported.items():
        (directory / name).write_bytes(content)
    theirs = AutoTokenizer.from_pretrained(directory)
    begin = [tokenizer.bos_id]
    assert [theirs.encode(text) for text in DRAWN] == [begin + tokenizer.encode(text) for text in DRAWN]


def test_files_of_sentence_pieces_that_say_nothing_new_leave_the_model_alone(sentence_pieces, tmp_path):
    """But for a template, which may also stand in chat_template.json. Without pairs, added tokens are refused."""
    settings = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    directory = write(tmp_path, None, **settings)
    (directory / "tokenizer.model").write_bytes(sentence_pieces)
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    tokenizer = load_tokenizer(directory)
    assert (type(tokenizer).__name__, tokenizer.own_template()) == ("SentencePieceTokenizer", TEMPLATE)
    (directory / "tokenizer_config.json").write_text(json.dumps(settings | {"add_bos_token": False}))
    assert load_tokenizer(directory).bos_id is None
    (directory / "added_tokens.json").write_text(json.dumps({"<x>": 99_999}))
    with refuses("'<x>' is 99999", "tokenizer_config.json", "added_tokens.json"):
        load_tokenizer(directory)
    proto = sentencepiece_model_pb2.ModelProto.FromString(sentence_pieces)
    proto.trainer_spec.model_type = proto.trainer_spec.UNIGRAM
    (directory / "tokenizer.model").write_bytes(proto.SerializeToString())
    with refuses("unigram", "tokenizer.json"):
        load_tokenizer(directory)


def write_pair(directory: Path, *front: str) -> Path:
    """vocab.json and merges.txt, with tokens before the others, as OPT has them."""
    bare = byte_level()
    bare.model.save(str(directory))
    tokens = sorted(bare.get_vocab(), key=bare.get_vocab().__getitem__)
    (directory / "vocab.json").write_text(json.dumps({token: n for n, token in enumerate([*front, *tokens])}))
    return directory


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "Qwen2Tokenizer"])
def test_vocab_and_merges_are_read_as_transformers_does_with_the_settings_beside(name, tmp_path):
    """OPT's begin token, tokens added behind, a template; Qwen's cut where the class is Qwen's."""
    settings = {"tokenizer_class": name, "add_bos_token": True, "bos_token": "</s>", "eos_token": "</s>"}
    end = {"content": "<|im_end|>", "special": True}
    size = 3 + len(byte_level().get_vocab())
    directory = write(
        *(tmp_path, None, "opt"), **settings, unk_token="</s>", pad_token="<pad>", chat_template=TEMPLATE,
        added_tokens_decoder={str(size): end},
    )  # fmt: skip
    tokenizer, theirs = (
        load(write_pair(directory, "<s>", "<pad>", "</s>")) for load in (load_tokenizer, AutoTokenizer.from_pretrained)
    )
    for text in (*TEXTS, "a <|im_end|> b"):
        assert [tokenizer.bos_id, *tokenizer.encode(text)] == theirs(text).input_ids
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size) == (2, 2, 1, size + 1)
    assert tokenizer.own_template() == TEMPLATE


def test_a_tokenizer_json_that_the_files_beside_contradict(tmp_path, caplog):
    """Other ids beside: the file's hold, with a line. Tokens that it lacks follow its last, or are refused."""
    file = byte_level("<s>", "</s>")
    size = file.get_vocab_size()
    directory = write(tmp_path, file, **NAMES)
    (directory / "added_tokens.json").write_text(json.dumps({"</s>": 7, "<x>": size}))
    tokenizer = load_tokenizer(directory)
    assert (tokenizer.eos_id, tokenizer.encode("<x>"), tokenizer.vocab_size) == (size - 1, [size], size + 1)
    assert not missing_names(caplog.text, "1 added tokens", "other ids")
    (directory / "added_tokens.json").write_text(json.dumps({"<x>": 7}))
    with refuses("'<x>' is token 7", "tokenizer.json", f"{size} tokens"):
        load_tokenizer(directory)


@pytest.mark.parametrize("stated", [{"eos_token": {"__type": "AddedToken", "content": "</s>", "lstrip": True}}, {}])
def test_names_of_special_tokens_in_their_places(stated, tmp_path):
    """As an object, whose flags do not change those of the file; in special_tokens_map.json alone; null."""
    file = byte_level("<s>", "</s>")
    directory = write(tmp_path, file, added_tokens_decoder={}, **stated)
    (directory / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>"}))
    tokenizer = load_tokenizer(directory)
    assert tokenizer.eos_id == file.token_to_id("</s>")
    assert tokenizer.encode("a </s> b") == file.encode("a </s> b").ids
    write(tmp_path, file, eos_token=None)
    (directory / "special_tokens_map.json").unlink()
    with refuses("no end-of-sequence token"):
        load_tokenizer(directory)


@pytest.mark.parametrize("place", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("name", ["bos_token", "eos_token"])
def test_a_begin_or_end_that_tokenizer_json_lacks_is_refused(name, place, tmp_path):
    """It would be a new row of the model, behind all that it has learnt. One with an id in a file beside is read."""
    file = byte_level("<s>", "</s>")
    size, beside = file.get_vocab_size(), tmp_path / "special_tokens_map.json"
    names = {**NAMES, name: "<|nope|>"}
    directory = write(tmp_path, file, **(names if place == "tokenizer_config.json" else {}))
    beside.write_text(json.dumps(names))
    with refuses(f"{name} is '<|nope|>'", "tokenizer.json", "no such token"):
        load_tokenizer(directory)
    (directory / "added_tokens.json").write_text(json.dumps({"<|nope|>": size}))
    tokenizer = load_tokenizer(directory)
    assert (tokenizer.encode("<|nope|>"), tokenizer.vocab_size) == ([size], size + 1)


def test_a_further_special_token_that_tokenizer_json_lacks_is_named(tmp_path, caplog):
    file = byte_level("<s>", "</s>")
    directory = write(tmp_path, file, **NAMES, pad_token="<pad>", additional_special_tokens=["</s>", "<|new|>"])
    assert load_tokenizer(directory).vocab_size == file.get_vocab_size() + 2
    assert "'<pad>' (pad_token), '<|new|>' (extra_special_tokens)" in caplog.text


def test_an_end_whose_id_is_0(tmp_path):
    """GPT-NeoX: the class alone names it."""
    file = byte_level()
    vocabulary = ["<|endoftext|>", *sorted(file.get_vocab(), key=file.get_vocab().__getitem__)]
    content = json.loads(file.to_str())
    content["model"]["vocab"] = {token: number for number, token in enumerate(vocabulary)}
    file = Tokenizer.from_str(json.dumps(content))
    file.add_special_tokens(["<|endoftext|>"])
    assert load_tokenizer(write(tmp_path, file, tokenizer_class="GPTNeoXTokenizer")).eos_id == 0


def test_ids_behind_a_gap_are_of_the_vocabulary(tmp_path):
    """Added tokens that start at a round number."""
    file = Tokenizer(models.BPE({"b": 0, "<s>": 6, "</s>": 7}, []))
    file.add_special_tokens(["<s>", "</s>"])
    file.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 6)])
    tokenizer = load_tokenizer(write(tmp_path, file, **NAMES))
    assert tokenizer.vocab_size == 8
    assert tokenizer.tokens() == ["b", *[""] * 5, "<s>", "</s>"]
    assert tokenizer.bos_id == 6, "also where `a` is no text that it knows"


def test_a_class_s_own_names_count_where_the_file_has_them(tmp_path):
    """GPT-2's settings name no token; LlamaTokenizer's `<unk>` is not added to a file without one."""
    tokenizer = load_tokenizer(write(tmp_path, byte_level("<|endoftext|>"), "gpt2"))
    assert tokenizer.tokens()[tokenizer.eos_id] == "<|endoftext|>"
    file = byte_level("<s>", "</s>")
    tokenizer = load_tokenizer(write(tmp_path, file, tokenizer_class="LlamaTokenizer"))
    assert (tokenizer.tokens()[tokenizer.eos_id], tokenizer.unk_id) == ("</s>", None)
    assert tokenizer.vocab_size == file.get_vocab_size()


def test_a_padding_token_beyond_the_model_is_left_out(tmp_path):
    """Conversions of Llama 2 with `<pad>`; no text becomes an id that the model has no row for."""
    file = byte_level("<s>", "</s>")
    rows = file.get_vocab_size()
    directory = write(tmp_path, file, **NAMES, pad_token="<pad>", chat_template=TEMPLATE)
    (directory / "added_tokens.json").write_text(json.dumps({"<pad>": rows}))
    assert load_tokenizer(directory).pad_id == rows
    write_config(directory, "llama", vocab_size=rows)
    tokenizer = load_tokenizer(directory)
    assert (tokenizer.vocab_size, tokenizer.pad_id, tokenizer.own_template()) == (rows, tokenizer.eos_id, TEMPLATE)
    for text in (*TEXTS, "a <pad> b"):
        assert max(tokenizer.encode(text)) < rows
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_config_json_with_a_fault_of_its_own_is_not_needed(tmp_path):
    """A layer_types list of another length, which transformers refuses."""
    file = byte_level("<s>", "</s>")
    directory = write(tmp_path, file, **NAMES)
    write_config(directory, "qwen2", num_hidden_layers=6, layer_types=["full_attention"] * 4)
    tokenizer = load_tokenizer(directory)
    assert tokenizer.encode("a b") == file.encode("a b").ids
    assert "cannot read it" in (transformers_difference(directory, tokenizer) or "")


def test_files_of_other_programs_and_code_are_refused_in_words_without_a_tokenizer_json(tmp_path):
    """Code is never run; beside a tokenizer.json it is not needed. Exports leave tekken.json out."""
    file = byte_level("<s>", "</s>")
    for name in ("tekken.json", "qwen.tiktoken"):
        directory = write(tmp_path / name, None, "mistral", **NAMES)
        (directory / name).write_text("{}")
        with refuses(name, "other programs", "tokenizer.json"):
            load_tokenizer(directory)
        assert not has_tokenizer(directory)
        (directory / "tokenizer.json").write_text(file.to_str())
        assert load_tokenizer(directory).encode("a b") == file.encode("a b").ids
    copied = {path.name for path in other_files(tmp_path / "tekken.json")}
    assert copied == {"tokenizer.json", "tokenizer_config.json"}
    code = {"auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}, "tokenizer_class": "OwnTokenizer"}
    directory = write(tmp_path / "code", None, "llama", **NAMES, **code)
    (directory / "tokenization_own.py").write_text("raise SystemExit('was run')")
    (directory / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\n")
    with refuses("code", "tokenization_own.OwnTokenizer", "never run"):
        load_tokenizer(directory)
    with refuses("tokenizer.model", "tiktoken"):
        load_tokenizer(directory / "tokenizer.model")
    (directory / "tokenizer.json").write_text(file.to_str())
    assert load_tokenizer(directory).encode("a b") == file.encode("a b").ids
