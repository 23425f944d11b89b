"""A Hugging Face sequence classifier as a reward, against transformers itself, and what it refuses.

Not covered: a whole run with one (tests/distributed/test_reward_runs.py).
"""

import json
from dataclasses import replace

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from megarlhf.config import RewardConfig
from megarlhf.rollout.rewards.batch import RewardBatch
from megarlhf.rollout.rewards.classifier import Classifier
from tests.classifiers import write_classifier
from tests.distributed.tiny import write_tiny_llama

CPU = torch.device("cpu")
LETTERS = "+=0123456789"
TEMPLATE = "{% for m in messages %}{{ '+' if m['role'] == 'user' else '=' }}{{ m['content'] }}{% endfor %}"


def write_tokenizer(folder, segments=False, **options):
    """One token a letter; the first tokens are special. `segments`: the second text of a pair is one of its own."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocabulary = {token: n for n, token in enumerate(["<unk>", "<s>", "</s>", "<pad>", *LETTERS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if segments:
        made.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B:1", special_tokens=[])
        options["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", eos_token="</s>", bos_token="<s>", **options
    )
    fast.save_pretrained(folder)
    return fast


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A language model's trunk with a scalar head, whose padding token is its eos, as many reward models have."""
    root = tmp_path_factory.mktemp("classifier")
    write_tiny_llama(root / "base", seed=0, num_layers=1)
    torch.manual_seed(0)
    model = LlamaForSequenceClassification.from_pretrained(root / "base", num_labels=1, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight)
    model.config.pad_token_id = 2
    model.save_pretrained(root / "scorer")
    write_tokenizer(root / "scorer", chat_template=TEMPLATE, model_max_length=24)
    return root / "scorer"


def batch(prompts, responses, finished=True):
    count = len(prompts)
    return RewardBatch(
        prompts=prompts,
        responses=responses,
        prompt_tokens=[[1]] * count,
        response_tokens=[[2]] * count,
        finished=[finished] * count,
        fields=[{}] * count,
        messages=[None] * count,
        samples=list(range(count)),
    )


BATCH = batch(["1+1=", "12+34=", "7"], ["2", "46", "80"])


def by_hand(path, texts):
    """Each text alone: no padding can matter."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    model = LlamaForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    model.config.pad_token_id = 99
    return [float(model(torch.tensor([tokenizer.encode(text, add_special_tokens=False)])).logits) for text in texts]


def scores(source, responses):
    found = source.start(responses).wait()
    assert not any(result.error for result in found)
    return [result.value for result in found]


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({}, ["1+1=2", "12+34=46", "780"]),
        ({"append_eos": True}, ["1+1=2</s>", "12+34=46</s>", "780</s>"]),
        ({"form": "chat"}, ["+1+1==2", "+12+34==46", "+7=80"]),
    ],
)
@pytest.mark.parametrize("batch_samples", [1, 2, 3])
def test_scores_are_those_of_each_text_alone(llama, options, texts, batch_samples):
    """Also where padding and end of sequence are one token: a padded row's last token is its own."""
    source = Classifier(llama, CPU, batch_samples=batch_samples, **options)
    assert scores(source, BATCH) == pytest.approx(by_hand(llama, texts), abs=1e-5)


def test_an_unfinished_response_has_no_end(llama):
    cut = batch(["1+1="], ["2"], finished=False)
    assert scores(Classifier(llama, CPU, append_eos=True), cut) == pytest.approx(by_hand(llama, ["1+1=2"]), abs=1e-5)


def test_what_is_too_long_has_failed_and_the_others_have_not(llama):
    found = Classifier(llama, CPU).start(batch(["1+1=", "1" * 20], ["2", "3" * 9])).wait()
    assert found[0].value == pytest.approx(by_hand(llama, ["1+1=2"])[0], abs=1e-5)
    assert found[1].value is None
    assert "has 29 tokens" in found[1].error
    assert "takes 24, and nothing is cut" in found[1].error


def test_a_score_that_is_no_number_is_a_failure_and_not_a_reward_that_does_not_apply(llama):
    source = Classifier(llama, CPU)
    source._model.score.weight.data.fill_(float("nan"))
    found = source.start(BATCH).wait()
    assert [(result.value, result.error) for result in found] == [(None, "is scored nan")] * 3


def test_labels_by_name_and_probabilities_of_pairs(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = BertConfig(
        vocab_size=40,
        max_position_embeddings=32,
        initializer_range=0.5,
        id2label={0: "bad", 1: "fine", 2: "good"},
        **sizes,
    )
    model = BertForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    tokenizer = write_tokenizer(tmp_path, segments=True)
    pairs = [tokenizer(p, r, return_tensors="pt") for p, r in zip(BATCH.prompts, BATCH.responses, strict=True)]
    assert all(pair["token_type_ids"].any() for pair in pairs), "the response is a segment of its own"
    logits = [model(**pair).logits for pair in pairs]
    without = model(input_ids=pairs[0]["input_ids"]).logits
    assert (without - logits[0]).abs().max() > 1e-3, "the segments count"
    expected = [float(each.softmax(-1)[0, 2]) for each in logits]
    source = Classifier(tmp_path, CPU, form="pair", label="good", output="probability")
    assert scores(source, BATCH) == pytest.approx(expected, abs=1e-5)
    assert scores(Classifier(tmp_path, CPU, form="pair", label=2, output="probability"), BATCH) == scores(source, BATCH)
    model.config.problem_type = "multi_label_classification"
    model.save_pretrained(tmp_path)
    several = Classifier(tmp_path, CPU, form="pair", label="good", output="probability")
    assert scores(several, BATCH) == pytest.approx([float(each.sigmoid()[0, 2]) for each in logits], abs=1e-5)
    with pytest.raises(ValueError, match=r"has 3 labels: 0 \(bad\), 1 \(fine\), 2 \(good\); say which"):
        Classifier(tmp_path, CPU)
    with pytest.raises(ValueError, match="has no label 'great'; it has 0"):
        Classifier(tmp_path, CPU, label="great")
    with pytest.raises(ValueError, match="has no chat template, which form = chat needs"):
        Classifier(tmp_path, CPU, label="good", form="chat")


def test_a_head_that_would_be_random_is_refused(tmp_path):
    """A language model's directory, which transformers would read as a classifier with a warning."""
    write_tiny_llama(tmp_path, seed=0, num_layers=1)
    write_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=r"lacks score.weight: its scores would be of random weights"):
        Classifier(tmp_path, CPU, label=0)


def test_what_is_no_classifier_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json; give the directory"):
        Classifier(tmp_path, CPU)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match="cannot be read as a sequence classifier"):
        Classifier(tmp_path, CPU)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"kind": "classifier"}, "got path = None; kind 'classifier' needs a path"),
        ({"kind": "rule", "rule": "exact_match", "path": "x"}, "kind 'rule' got path"),
        ({"kind": "rule", "rule": "exact_match", "append_eos": True}, "does not read append_eos; leave that out"),
        ({"kind": "clasifier", "path": "x"}, "Input should be 'model', 'rule', 'http', 'classifier' or 'environment'"),
    ],
)
def test_keys_of_other_kinds_are_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        RewardConfig.model_validate(keys)


CHATML = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'][0] }}]{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)


@pytest.mark.parametrize("template", [CHATML, None])
def test_a_conversation_has_one_begin_and_the_end_of_its_turn_in_either_form(tmp_path, template):
    """The rendered prompt has the begin, which the tokenizer would write again; the turn ends as its template ends it,
    not with the end of sequence. Without a template of its own the classifier reads what the actor's has written."""
    special = {"special": ("<unk>", "<s>", "</s>", "<pad>", "<end>"), "additional_special_tokens": ["<end>"]}
    path = write_classifier(tmp_path, tokenizer={**special, "chat_template": template})
    rows = replace(
        batch(["<s>[u]1+1=<end>[a]", "<s>[u]7<end>[a]"], ["2", "80"]),
        messages=[[{"role": "user", "content": text}] for text in ("1+1=", "7")],
        ends=["<end>", "<end>"],
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    texts = ["<s>[u]1+1=<end>[a]2<end>", "<s>[u]7<end>[a]80<end>"]
    expected = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    for options in ({}, {"append_eos": True}, {"form": "chat"})[: 3 if template else 2]:
        source = Classifier(path, CPU, **options)
        assert [source._encoded(rows, n)["input_ids"] for n in range(2)] == expected
    (pair,) = [Classifier(path, CPU, form="pair")._encoded(rows, 0)["input_ids"]]
    assert pair.count(tokenizer.bos_token_id) == 1
