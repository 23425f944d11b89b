"""Published tokenizers beside the config.json of each family: `make test-published`. Not covered: tokenizers that no
package has, such as OPT's and Phi-3's."""

import json
import shutil
from pathlib import Path

import mistral_common
import pytest
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer as FastTokenizer
from transformers import AutoTokenizer

from megarlhf.config import ConversationConfig, ModelConfig
from megarlhf.data.samples.encoders import PromptEncoder
from megarlhf.data.samples.texts import pieces
from megarlhf.data.text.export_files import export_files
from megarlhf.data.text.templates import Conversation, chat_template
from megarlhf.data.tokenizers.comparison import transformers_difference
from megarlhf.data.tokenizers.tokenizer import load_tokenizer
from tests.published.texts import draw, write_config
from tests.refuses import refuses
from tools import pretrained, published

pytestmark = [pytest.mark.published, pytest.mark.timeout(600)]

TEXTS = draw(3000)
TOKENIZERS = {
    "deepseek_v3": ("deepseek_v3 llama qwen2 qwen3 mistral", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "deepseek": ("deepseek_v3 llama qwen2", None, "<｜end▁of▁sentence｜>"),
    "gemma3": ("gemma3_text llama", "<bos>", "<end_of_turn>"),
    "gptoss": ("gpt_oss llama", None, "<|return|>"),
    "llama2": ("llama mistral mixtral phi3 qwen2", "<s>", "</s>"),
    "llama3": ("llama mistral qwen2", None, "<|end_of_text|>"),
    "llama3_1": ("llama mistral qwen2", "<|begin_of_text|>", "<|eot_id|>"),
    "qwen3": ("qwen3 qwen3_moe qwen2 llama mistral", None, "<|im_end|>"),
    "smollm2": ("llama qwen2 gpt2 opt", None, "<|im_end|>"),
}
"""The families that are published with it, or might be; what begins and what ends a text: as the files say, and for
Llama's classes as transformers 4 read `add_bos_token`."""
CHANGES_TEXT = {"qwen3"}
"""Bring text into NFC first."""


def folder_of(name: str) -> Path:
    return pretrained.directory() if name == "smollm2" else published.fetch(name)


def write_directory(name: str, directory: Path, model_type: str) -> Path:
    write_config(directory, model_type)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (folder_of(name) / file).is_file():
            shutil.copyfile(folder_of(name) / file, directory / file)
    return directory


def truth_of(name: str) -> tuple[FastTokenizer, list[str], list[list[int]]]:
    file = FastTokenizer.from_file(str(folder_of(name) / "tokenizer.json"))
    special = [token.content for token in file.get_added_tokens_decoder().values()][:40]
    texts = [*TEXTS, *(f"a{token}b {token} c\n{token}" for token in special)]
    return file, texts, [file.encode(text, add_special_tokens=False).ids for text in texts]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_ids_begin_and_end_are_the_file_s_beside_each_family(name, tmp_path):
    families, begin, end = TOKENIZERS[name]
    file, texts, expected = truth_of(name)
    for model_type in families.split():
        tokenizer = load_tokenizer(write_directory(name, tmp_path / model_type, model_type))
        assert [tokenizer.encode(text) for text in texts] == expected, model_type
        assert tokenizer.bos_id == (None if begin is None else file.token_to_id(begin)), model_type
        assert tokenizer.eos_id == file.token_to_id(end), model_type
        ids = [*file.encode("a", add_special_tokens=False).ids, tokenizer.eos_id]
        assert pieces("a", tokenizer, 99) == [ids if begin is None else [tokenizer.bos_id, *ids]]
    lost = [text for text, ids in zip(TEXTS, expected, strict=False) if tokenizer.decode(ids) != text]
    assert lost == [] if name not in (*CHANGES_TEXT, "llama2") else len(lost) < len(TEXTS) / 4
    for text in TEXTS[:500]:
        ids = tokenizer.encode(text, continuation=True)
        assert tokenizer.decode(ids, continuation=True) == tokenizer.decode([*tokenizer.encode("a"), *ids])[1:]


@pytest.mark.parametrize("name", [name for name in TOKENIZERS if name not in ("deepseek", "gptoss", "llama2")])
def test_its_own_template_writes_one_begin_and_ids_of_the_file(name, tmp_path):
    directory = write_directory(name, tmp_path, "llama")
    file, tokenizer = FastTokenizer.from_file(str(directory / "tokenizer.json")), load_tokenizer(directory)
    template = chat_template(tokenizer)
    talk = [{"role": "user", "content": "Hello  there,\n你好"}, {"role": "assistant", "content": "A\n\nB"}]
    text = template.text(Conversation(talk))
    assert template.ids(text) == file.encode(text, add_special_tokens=False).ids
    prompt = PromptEncoder(tokenizer=directory, max_prompt_tokens=999).open()(0, {"messages": talk[:1]})
    assert prompt.tokens[:2] != [tokenizer.named_bos_id] * 2
    assert prompt.tokens == file.encode(prompt.text, add_special_tokens=False).ids


@pytest.mark.parametrize("name, model_type", [
    ("deepseek_v3", "llama"), ("deepseek_v3", "mistral"), ("llama2", "llama"),
])  # fmt: skip
def test_transformers_reads_an_export_as_it_was_trained(name, model_type, tmp_path):
    """Where it would not read the files of the model so; begin included."""
    model = write_directory(name, tmp_path / "model", model_type)
    tokenizer = load_tokenizer(model)
    assert transformers_difference(model, tokenizer) is not None
    export = shutil.copytree(model, tmp_path / "export")
    for file, content in export_files(ModelConfig(path=model), ConversationConfig(), ()).items():
        (export / file).write_bytes(content)
    theirs = AutoTokenizer.from_pretrained(export)
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    assert [theirs(text).input_ids for text in TEXTS] == [begin + tokenizer.encode(text) for text in TEXTS]
    assert theirs.eos_token_id == tokenizer.eos_id
    assert theirs.chat_template == tokenizer.own_template()


DATA = Path(mistral_common.__file__).parent / "data"


@pytest.mark.parametrize("model_type", ["mistral", "llama"])
@pytest.mark.parametrize("file", ["tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3"])
def test_mistral_s_pieces_with_added_tokens(file, model_type, tmp_path):
    """ids of texts are SentencePiece's, which transformers 5 does not make."""
    write_config(tmp_path, model_type)
    shutil.copyfile(DATA / file, tmp_path / "tokenizer.model")
    alone = SentencePieceProcessor(model_file=str(DATA / file))
    size = alone.get_piece_size()
    assert load_tokenizer(tmp_path).vocab_size == size
    settings = {"tokenizer_class": "LlamaTokenizer", "eos_token": "<|im_end|>", "add_bos_token": True, "legacy": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|im_end|>": size, "<|im_start|>": size + 1}))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (size + 2, 1, size)
    assert [tokenizer.encode(text) for text in TEXTS] == [alone.encode(text) for text in TEXTS]
    assert [tokenizer.decode(tokenizer.encode(text)) for text in TEXTS] == TEXTS
    assert tokenizer.encode("<|im_start|>user") == [size + 1, *alone.encode("user")]
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    different = sum(theirs.encode(t, add_special_tokens=False) != alone.encode(t) for t in TEXTS)
    assert different > len(TEXTS) / 10, "if not, transformers has been corrected"


def test_tekken_and_tiktoken_files_are_refused_in_words(tmp_path):
    for place, file in (("tekken", DATA / "tekken_240911.json"), ("qwen", folder_of("qwen") / "qwen.tiktoken")):
        write_config(tmp_path / place, "mistral")
        name = "tekken.json" if place == "tekken" else file.name
        shutil.copyfile(file, tmp_path / place / name)
        with refuses(name, "other programs", "tokenizer.json"):
            load_tokenizer(tmp_path / place)
    shutil.copyfile(folder_of("qwen") / "qwen.tiktoken", tmp_path / "tokenizer.model")
    with refuses("tokenizer.model", "tiktoken"):
        load_tokenizer(tmp_path)


def test_tekken_beside_a_tokenizer_json_is_not_read(tmp_path):
    directory = write_directory("llama3_1", tmp_path, "mistral")
    shutil.copyfile(DATA / "tekken_240911.json", directory / "tekken.json")
    _, texts, expected = truth_of("llama3_1")
    tokenizer = load_tokenizer(directory)
    assert [tokenizer.encode(text) for text in texts[-500:]] == expected[-500:]
    assert "MistralCommonBackend" in (transformers_difference(directory, tokenizer) or "")
