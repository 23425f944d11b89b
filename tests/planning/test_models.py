"""Models that do not belong together, or lack the head that their role needs, are refused before a rank starts. Not
covered: Megatron checkpoints (tests/weights opens them), and tokenizers that differ only in how they cut text into
tokens: the actor's alone does that."""

import io
import json

import pytest
import torch
from safetensors.torch import save_file
from sentencepiece import SentencePieceTrainer
from tokenizers import Regex, Tokenizer, models, normalizers
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from megarlhf.architectures.hf_config import architecture_from_hf
from megarlhf.architectures.placements import logical_tensors
from megarlhf.config import ConversationConfig, RoleConfig
from megarlhf.data.tokenizers.comparison import text_not_kept
from megarlhf.data.tokenizers.tokenizer import (
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    first_difference,
    load_tokenizer,
)
from megarlhf.planning.data.end_tokens import end_notes
from megarlhf.planning.models import check_heads, check_vocabularies
from tests.planning.configs import MODEL
from tests.refuses import missing_names, refuses
from tools.demo.make_data import train_tokenizer


def with_pieces(change):
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(train_tokenizer())
    change(proto)
    return proto.SerializeToString()


ROLES = ("critic", "reward_model")


@pytest.fixture
def model(tmp_path):
    def write(name, *, tokenizer=None, head="lm", score=0.0, **changes):
        directory = tmp_path / name
        directory.mkdir()
        kind = {"lm": "LlamaForCausalLM", "scalar": "LlamaForSequenceClassification"}[head]
        config = {**MODEL, "architectures": [kind]}
        (directory / "config.json").write_text(json.dumps(config | changes))
        if tokenizer != b"":
            (directory / "tokenizer.model").write_bytes(tokenizer or train_tokenizer())
        shapes = logical_tensors(architecture_from_hf(directory), head)
        tensors = {key: torch.zeros(shape) for key, shape in shapes.items()}
        if head == "scalar":
            tensors["score.weight"][0, -1] = score
        save_file(tensors, directory / "model.safetensors")
        return RoleConfig.model_validate({"model": {"path": directory}})

    return write


def swapped(proto):
    proto.pieces[7].piece, proto.pieces[8].piece = proto.pieces[8].piece, proto.pieces[7].piece


def longer(proto):
    proto.pieces.add(piece="q", score=-99.0)


def another_end(proto):
    proto.pieces[2].piece, proto.trainer_spec.eos_piece = "<end>", "<end>"


def sentence_pieces(**options):
    """Of letters, digits and white space, in SentencePiece's own defaults but for `options`."""
    content = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(["Ab 12 Ef", "A b 1 2 E f"] * 20), model_writer=content, model_type="char",
        vocab_size=20, hard_vocab_limit=False, **{"minloglevel": 2, "user_defined_symbols": ["\n", "\t"], **options},
    )  # fmt: skip
    return content.getvalue()


@pytest.mark.parametrize("options, becomes", [
    ({}, "'Ab 12"),
    ({"normalization_rule_name": "nmt_nfkc_cf", "remove_extra_whitespaces": False}, "'ab  12"),
    ({"normalization_rule_name": "identity", "remove_extra_whitespaces": False}, None),
])  # fmt: skip
def test_a_tokenizer_that_changes_texts_is_named(model, options, becomes):
    actor = model("actor", tokenizer=sentence_pieces(**options))
    notes = check_vocabularies({"actor": actor})
    assert len(notes) == (becomes is not None)
    assert all("'Ab  12" in note and f" becomes {becomes}" in note for note in notes)


@pytest.mark.parametrize("normalizer", [normalizers.Lowercase(), normalizers.Replace(Regex(r"\s+"), " ")])
def test_a_tokenizer_json_that_changes_texts_is_named_and_one_that_composes_characters_is_not(normalizer):
    file = Tokenizer(models.BPE({letter: n for n, letter in enumerate(sorted(ByteLevel.alphabet()))}, []))
    file.pre_tokenizer, file.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    file.add_special_tokens(["</s>"])
    for normal in (None, normalizers.NFC()):
        if normal is not None:
            file.normalizer = normal
        assert text_not_kept(of_file(file)) is None
    file.normalizer = normalizer
    text, read = text_not_kept(of_file(file))
    assert (text, read) == ("Ab  12\n\n\tEf", normalizer.normalize_str(text))


def of_file(file):
    return HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=file, eos_token="</s>"), "here")


def test_a_role_that_reads_other_tokens_than_the_actor_writes_is_refused(model):
    """The sizes are equal: only the meaning of two ids differs."""
    actor, other = model("actor"), model("other", tokenizer=with_pieces(swapped))
    mine = load_tokenizer(actor.model.path).tokens()
    assert (len(set(mine)), mine[1:4]) == (16, ["<s>", "</s>", "<pad>"])
    for role in ("reference", "critic", "reward_model"):
        with refuses(
            role, str(other.model.path), f"{actor.model.path} (actor)", "token 7", repr(mine[7]), repr(mine[8])
        ):
            check_vocabularies({"actor": actor, role: other})
    with refuses("against", "reward model", "rewards: [{kind: model, retokenize: true}]"):
        check_vocabularies({"actor": actor, "against": other})
    assert check_vocabularies({"actor": actor, "critic": model("same")}) == []


def test_what_differs_and_what_does_not_count():
    """A reader may know more tokens; special tokens are tokens, and which of them end a text counts too."""
    plain = SentencePieceTokenizer(train_tokenizer())
    more = SentencePieceTokenizer(with_pieces(longer))
    assert first_difference(plain, more) is None
    assert not missing_names(first_difference(more, plain), "token 16", "'q'", "16 tokens only")
    ended = SentencePieceTokenizer(with_pieces(another_end))
    assert not missing_names(first_difference(plain, ended), "token 2", "'</s>'", "'<end>'")
    ended = SentencePieceTokenizer(train_tokenizer())
    ended.eos_id, ended.pad_id = 1, 9
    assert not missing_names(first_difference(plain, ended), "eos_id", "2 in the first", "1 in the second")


def test_a_model_without_a_tokenizer_is_taken_at_its_size_and_that_is_said(model):
    actor, bare = model("actor"), model("bare", tokenizer=b"")
    (note,) = check_vocabularies({"actor": actor, "critic": bare})
    assert missing_names(note, f"critic: {bare.model.path}", "vocab_size", "actor") == []
    with refuses("critic", "vocab_size = 101", "100", str(actor.model.path)):
        check_vocabularies({"actor": actor, "critic": model("wide", tokenizer=b"", vocab_size=101)})


def test_further_end_tokens_are_said(model):
    """The demo's tokenizer ends with token 2; the first model's file alone counts, since it writes the responses."""
    actor = model("actor", eos_token_id=[2, 5])
    assert check_vocabularies({"actor": actor, "critic": model("critic", eos_token_id=7)}) == []
    (note,) = end_notes("actor", actor, ConversationConfig(), generates=True)
    assert missing_names(note, "actor", "token 2 (</s>)", "5", "first only") == []


def test_a_language_model_has_no_scores(model):
    """Only a critic may start with a fresh head, and says so; `rm` makes one on purpose."""
    language, scalar = model("language"), model("scalar", head="scalar", score=0.5)
    fresh = RoleConfig.model_validate({"model": {"path": language.model.path, "fresh_head": True}})
    for role in ("critic", "reward_model"):
        with refuses(role, str(language.model.path), "no scalar head", "fresh_head"):
            check_heads({role: language}, trains_reward_model=False)
        (note,) = check_heads({role: scalar}, trains_reward_model=False)
        assert not missing_names(note, role, "loaded", str(scalar.model.path))
    (note,) = check_heads({"critic": fresh}, trains_reward_model=False)
    assert not missing_names(note, "critic", "starts at zero", str(language.model.path))
    (note,) = check_heads({"reward_model": language}, trains_reward_model=True)
    assert not missing_names(note, "reward_model", "starts at random", str(language.model.path))


def test_a_head_that_is_there_and_one_that_scores_nothing(model):
    """A fresh head in place of one that is stored is said; one of zeros gives no rewards, though values may start
    there; one of NaN gives nothing."""
    scalar, zero = model("scalar", head="scalar", score=0.5), model("zero", head="scalar")
    broken = model("broken", head="scalar", score=float("nan"))
    fresh = RoleConfig.model_validate({"model": {"path": scalar.model.path, "fresh_head": True}})
    (note,) = check_heads({"critic": fresh}, trains_reward_model=False)
    assert missing_names(note, "starts at zero", "critic.model.fresh_head = false") == []
    (of_rm,) = check_heads({"reward_model": fresh}, trains_reward_model=True)
    assert "starts at random" in of_rm
    with refuses("reward_model", str(zero.model.path), "megarlhf rm"):
        check_heads({"reward_model": zero}, trains_reward_model=False)
    for roles in ({"critic": zero}, {"reward_model": zero}):
        (note,) = check_heads(roles, trains_reward_model="critic" not in roles)
        assert not missing_names(note, "loaded", str(zero.model.path), "zero")
    for role in ("critic", "reward_model"):
        with refuses(role, str(broken.model.path), "NaN"):
            check_heads({role: broken}, trains_reward_model=False)


def test_a_critics_head_of_zeros_is_trained(model):
    """Frozen it would say 0 of every response."""
    path = model("language").model.path

    def critic(**frozen):
        return {"critic": RoleConfig.model_validate({"model": {"path": path, "fresh_head": True}, **frozen})}

    for frozen in ({"freeze": ["score"]}, {"train_only": ["model.layers.*"]}):
        with refuses("critic", f"critic.{next(iter(frozen))}", "score.weight"):
            check_heads(critic(**frozen), trains_reward_model=False)
    for frozen in ({"freeze": ["embed_tokens"]}, {"train_only": ["score"]}, {"lora": {}}):
        assert check_heads(critic(**frozen), trains_reward_model=False)


def test_random_weights_give_no_rewards(model):
    roles = {name: RoleConfig.model_validate({"model": {"path": str(MODEL), "random_init": True}}) for name in ROLES}
    with refuses("reward_model.model.random_init = true", "megarlhf rm"):
        check_heads(roles, trains_reward_model=False)
    (note,) = check_heads({"critic": roles["critic"]}, trains_reward_model=False)
    assert not missing_names(note, "critic", "at random", str(MODEL))
    assert check_heads({"reward_model": roles["reward_model"]}, trains_reward_model=True) == []


def test_a_reward_model_writes_no_responses(model):
    with refuses("actor", "LlamaForSequenceClassification"):
        check_heads({"actor": model("scalar", head="scalar")}, trains_reward_model=False)


def test_a_model_that_is_not_there_is_told_before_a_rank_starts(model):
    role = model("empty", head="scalar")
    (role.model.path / "model.safetensors").unlink()
    with refuses("is no checkpoint"):
        check_heads({"critic": role}, trains_reward_model=False)
