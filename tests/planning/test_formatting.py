"""The stages of a chain write alike: what exports state of how their run wrote, against the next run. That trained
models state it is shown in tests/distributed; not covered: data of the hub, of which nobody knows the form before."""

import json

import pytest

from megarlhf.config import DPOConfig, EvaluateConfig, GenerateConfig, RLConfig, RMConfig, SFTConfig
from megarlhf.config.ask import AskConfig
from megarlhf.planning.data.formatting import check_writing, writing_of_training
from megarlhf.provenance import FILE, Provenance, Weights, read_provenance
from tests.data.chat_styles import CHATML, LLAMA_3, write_chat_tokenizer
from tests.refuses import refuses

USER, ANSWER, WRONG = ({"role": role, "content": text} for role, text in
                       (("user", "1+1"), ("assistant", "2"), ("assistant", "3")))  # fmt: skip
ROWS = {
    "talks": {"messages": [USER, ANSWER]}, "texts": {"prompt": "1+1", "response": "2"}, "raw": {"text": "1+1=2"},
    "asked": {"prompt": [USER], "answer": "2"}, "question": {"prompt": "1+1", "answer": "2"},
    "rendered": {"prompt": "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n", "response": "2"},
    "pairs": {"prompt": [USER], "chosen": [ANSWER], "rejected": [WRONG]},
    "text_pairs": {"prompt": "1+1", "chosen": "2", "rejected": "3"},
}  # fmt: skip
KINDS = {"sft": SFTConfig, "rm": RMConfig, "dpo": DPOConfig, "rl": RLConfig, "generate": GenerateConfig,
         "eval": EvaluateConfig}  # fmt: skip
STEPS = {"num_steps": 1, "mini_batch_samples": 1, "micro_batch_samples": 1}
RULE = [{"kind": "rule", "rule": "exact_match"}]


@pytest.fixture
def run(tmp_path):
    for name, row in ROWS.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")

    def make(command, model, train, reward_model=None, critic=None, reference=None, rewards=RULE, **data):
        role = {"model": {"path": model}}
        tree = {"run": {"dir": tmp_path / "run"}, "data": {"train": tmp_path / f"{train}.jsonl", **data}}
        tree["reward_model" if command == "rm" else "actor"] = role
        if command in ("sft", "rm", "dpo"):
            tree |= {"train": STEPS}
            tree |= {"reference": {"model": {"path": reference or model}}} if command == "dpo" else {}
        else:
            given = {"reward_model": reward_model, "critic": critic, "reference": reference}
            tree |= {name: {"model": {"path": path}} for name, path in given.items() if path is not None}
            tree |= {"rewards": [*rewards, *([{"kind": "model"}] if reward_model else [])]}
        if command == "rl":
            tree |= {"train": {**STEPS, "prompts_per_step": 1, "mini_batch_samples": 2}}
            tree |= {"algo": {"advantage": "gae" if critic else "grpo", "kl": {"coef": 0.1}}}
            tree["rollout"] = {"num_samples_per_prompt": 2}
        return KINDS[command].model_validate(tree)

    return make


def described(directory, template):
    """A model of which there is no more than its tokenizer."""
    (write_chat_tokenizer(directory, template) / "config.json").write_text("{}")
    return directory


@pytest.fixture
def trained(tmp_path, run):
    """The function that makes what a run of `command` on these rows would have exported."""

    def make(name, command, train, template=CHATML, base=None, **data):
        model = described(tmp_path / name, template)
        cfg = run(command, base or model, train, **data)
        stated = Provenance(
            command=command, role="actor", run="/runs/first", step=1,
            base=Weights(path="/base", digest="0", dtype="bfloat16"),
            writing=writing_of_training(cfg, "reward_model" if command == "rm" else "actor"),
        )  # fmt: skip
        assert Provenance.from_json(stated.to_json()) == stated
        (model / FILE).write_text(stated.to_json())
        return model

    return make


@pytest.mark.parametrize("command, rows, fits", [
    ("sft", "talks", True), ("rl", "asked", True), ("dpo", "pairs", True), ("rm", "pairs", True),
    ("generate", "asked", True), ("eval", "asked", True), ("sft", "raw", True), ("sft", "rendered", True),
    ("rl", "question", False), ("sft", "texts", False), ("dpo", "text_pairs", False), ("rm", "text_pairs", False),
    ("generate", "question", False), ("eval", "question", False),
])  # fmt: skip
def test_after_fine_tuning_on_conversations(trained, run, command, rows, fits):
    """Raw texts are learnt as in pretraining, and say nothing of how prompts are written."""
    model = trained("sft", "sft", "talks")
    if fits:
        assert check_writing(run(command, model, rows)) == []
        return
    with refuses("/runs/first", "megarlhf sft", "knows no texts", "data.other_writing=allow"):
        check_writing(run(command, model, rows))
    (note,) = check_writing(run(command, model, rows, other_writing="allow"))
    assert note.startswith("WARNING: ")


def test_texts_and_conversations_may_be_what_a_model_knows(trained, run, tmp_path):
    both = [tmp_path / "talks.jsonl", tmp_path / "texts.jsonl"]
    model = described(tmp_path / "model", CHATML)
    cfg = run("sft", model, "talks")
    cfg = type(cfg).model_validate({**cfg.model_dump(mode="json"), "data": {"train": [str(path) for path in both]}})
    writing = writing_of_training(cfg, "actor")
    assert sorted(writing) == ["conversations", "texts"]
    assert (writing["texts"], writing["conversations"]["end"]) == ({"end": 2}, 5)
    with refuses("knows no conversations"):
        check_writing(run("rl", trained("texts", "sft", "texts"), "asked"))
    check_writing(run("rl", trained("plain", "sft", "texts"), "question"))


def test_another_template_other_arguments_and_another_end(trained, run):
    model = trained("sft", "sft", "talks", template_args={"enable_thinking": False})
    check_writing(run("rl", model, "asked", template_args={"enable_thinking": False}))
    with refuses("conversations", "other template_args"):
        check_writing(run("rl", model, "asked"))
    with refuses("another chat template", "another end of answers"):
        check_writing(run("rl", trained("plain", "sft", "talks"), "asked", chat_template=LLAMA_3))


def test_the_reward_model_is_looked_at_as_it_reads(trained, run, tmp_path):
    actor, scorer = trained("sft", "sft", "talks"), trained("rm", "rm", "text_pairs")
    with refuses("reward_model", "knows no conversations"):
        check_writing(run("rl", actor, "asked", reward_model=scorer))
    check_writing(run("rl", actor, "asked", reward_model=trained("good", "rm", "pairs")))


def test_all_roles_that_read_the_actor_s_ids_are_looked_at(trained, run):
    """A critic that was a reward model, a reference of its own. By the actor's template, whatever their own are."""
    actor = trained("sft", "sft", "talks")
    for name, command, kind in (("critic", "rl", "asked"), ("reference", "rl", "asked"), ("reference", "dpo", "pairs")):
        earlier = ("sft", "texts") if name == "reference" else ("rm", "text_pairs")
        with refuses(name, "knows no conversations", "data.template"):
            check_writing(run(command, actor, kind, **{name: trained(f"old_{name}", *earlier)}))
        earlier = ("sft", "talks") if name == "reference" else ("rm", "pairs")
        assert check_writing(run(command, actor, kind, **{name: trained(f"good_{name}", *earlier)})) == []
    own = trained("own", "rm", "pairs", template=LLAMA_3)
    for name in ("critic", "reward_model"):
        with refuses(name, "another chat template", "another end of answers"):
            check_writing(run("rl", actor, "asked", **{name: own}))
    notes = check_writing(run("rl", actor, "asked", critic=own, reward_model=own, other_writing="allow"))
    assert [note.split(":")[1] for note in notes] == [" critic", " reward_model"]


@pytest.mark.parametrize("rows, form, fault", [
    ("asked", {}, None), ("asked", {"form": "chat"}, None), ("asked", {"form": "pair"}, "knows no pairs of texts"),
    ("question", {"form": "chat"}, None), ("question", {"append_eos": True}, "knows no texts"), ("rendered", {}, None),
])  # fmt: skip
@pytest.mark.parametrize("command", ["rl", "generate", "eval"])
def test_a_classifier_is_looked_at_as_it_writes(trained, run, command, rows, form, fault):
    """By its own tokenizer and template, in the form of the reward. It was trained on conversations here."""
    judge = {"kind": "classifier", "path": trained("judge", "rm", "pairs", template=LLAMA_3), "name": "judge", **form}
    cfg = run(command, described(judge["path"].parent / "new", CHATML), rows, rewards=[*RULE, judge])
    if fault is None:
        assert check_writing(cfg) == []
        return
    with refuses("reward 'judge'", str(judge["path"]), fault, "Set form: joined"):
        check_writing(cfg)


def test_a_classifier_of_texts_is_read_at_the_end_that_it_was_trained_at(trained, run, tmp_path):
    new, judge = described(tmp_path / "new", None), trained("judge", "rm", "text_pairs")
    reward = {"kind": "classifier", "path": judge}
    check_writing(run("rl", new, "question", rewards=[{**reward, "append_eos": True}]))
    with refuses("another end of answers", "append_eos: true"):
        check_writing(run("rl", new, "question", rewards=[reward]))
    with refuses("knows no conversations"):
        check_writing(run("rl", new, "question", rewards=[{**reward, "form": "chat"}]))
    bare = trained("bare", "rm", "text_pairs", template=None)
    with refuses("knows no conversations"):
        check_writing(run("rl", described(tmp_path / "chat", CHATML), "asked", rewards=[{**reward, "path": bare}]))


def test_the_model_that_is_compared_with_is_looked_at(trained, run):
    tree = run("eval", trained("sft", "sft", "talks"), "asked").model_dump(mode="json", exclude_unset=True)
    old = {**tree, "against": {"model": {"path": str(trained("old", "sft", "texts"))}}}
    with refuses("against", "knows no conversations"):
        check_writing(EvaluateConfig.model_validate(old))


def test_what_was_known_goes_through_raw_texts_and_is_not_asked_of_others(trained, run, tmp_path):
    """Nor of a model of an earlier version, whose file does not say it, or of one that was trained elsewhere."""
    model = trained("then", "sft", "raw", base=trained("sft", "sft", "talks"))
    with refuses("knows no texts"):
        check_writing(run("rl", model, "question"))
    tree = json.loads((model / FILE).read_text())
    del tree["writing"]
    (model / FILE).write_text(json.dumps(tree))
    assert check_writing(run("rl", model, "question")) == []
    (model / FILE).unlink()
    assert check_writing(run("rl", model, "question")) == []


def test_what_is_typed_is_written_as_it_was_learnt(trained, tmp_path):
    def ask(model, **data):
        tree = {"run": {"dir": tmp_path / "run"}, "actor": {"model": {"path": model}}, "data": data}
        return AskConfig.model_validate(tree)

    talks, texts = trained("talks", "sft", "talks"), trained("texts", "sft", "texts")
    assert check_writing(ask(talks, template="chat")) == check_writing(ask(texts)) == []
    with refuses("knows no texts"):
        check_writing(ask(talks))
    with refuses("knows no conversations"):
        check_writing(ask(texts, template="chat"))
    assert "WARNING" in check_writing(ask(talks, other_writing="allow"))[0]


def test_a_statement_of_another_kind_is_refused_in_words(trained):
    model = trained("talks", "sft", "talks")
    stated = json.loads((model / FILE).read_text())
    for wrong in ("x", ["x"], {"texts": 2}):
        (model / FILE).write_text(json.dumps({**stated, "writing": wrong}))
        with refuses(str(model / FILE), "where the model comes from"):
            read_provenance(model)
