"""Environments that answer a chat model with messages, and the commands beside rl.

Bit for bit in fp32 on a CPU. Not covered: published templates (tests/published/test_turns.py).
"""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megarlhf.commands import chat as ask
from megarlhf.config import load_config
from megarlhf.config.ask import AskConfig
from megarlhf.data.tokenizers.tokenizer import load_tokenizer
from megarlhf.observe.records.metrics import read_metrics
from megarlhf.observe.report.page import write_report
from megarlhf.runtime import Runtime
from megarlhf.trainers.generation.chat import run as run_chat
from tests.chat_model import byte_level_bpe, write_chat_model
from tests.classifiers import CHAT_TEMPLATE, write_classifier
from tests.command import argv_of
from tests.distributed.environment_jobs import failing_command
from tests.distributed.test_slices import killed, run
from tests.refuses import lines_naming
from tests.rollout.turn_styles import OPENED

HERE = "tests.distributed.environments:"
FAIL = ("3", "4", "9")
"""Answers of prompts whose environment fails after the second turn."""
STOPS = ("e", "a", "o", "i", "1", "n", "t", "s", "r")
"""Texts that end a turn: the random model hardly ever writes the end of one."""


@pytest.fixture(scope="module")
def chat(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("chat")
    lines = [{"messages": [{"role": "user", "content": f"question {n}"}], "answer": str(n)} for n in range(16)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {"model": write_chat_model(folder / "model"), "prompts": folder / "prompts.jsonl"}


def tree(chat: dict[str, Path], args: Any = (), **changes: Any) -> dict[str, Any]:
    """GRPO of a step with 8 conversations of 3 turns."""
    cfg: dict[str, Any] = {
        "actor": {"model": {"path": str(chat["model"])}, "optim": {"lr": 1e-3}},
        "data": {"train": str(chat["prompts"]), "max_prompt_tokens": 80},
        "rollout": {"num_samples_per_prompt": 2, "max_response_tokens": 200, "stop": list(STOPS)},
        "environment": {"function": HERE + "Guess", "args": dict(args), "max_turn_tokens": 40},
        "rewards": [{"kind": "environment"}],
        "algo": {"advantage": "group_relative", "kl": {"coef": 0.0}},
        "train": {"num_steps": 1, "prompts_per_step": 4, "mini_batch_samples": 8, "micro_batch_samples": 4},
    }
    return {**cfg, **changes}


@pytest.mark.parametrize("args", [{}, {"role": "tool"}, {"begins": True}], ids=["user", "tools", "begins"])
def test_a_conversation_is_what_the_template_writes_of_it(args, chat, vllm_ranks, tmp_path) -> None:
    """Token for token, but for those that the model sampled: they are what it sampled, and decode to the same text."""
    judged = {"kind": "rule", "rule": HERE + "noted", "workers": 0, "check": "none"}
    cfg = tree(chat, args, rewards=[{"kind": "environment"}, judged], samples={"every": 1, "count": 8})
    steps, _ = run(vllm_ranks, 1, cfg, tmp_path / "run")
    metrics = read_metrics(tmp_path / "run/run")
    columns, file = steps[0]["columns"], byte_level_bpe()
    assert metrics[1]["rollout_logprob_gap_max"] < 1e-4
    assert metrics[1]["turns_rewritten"] == 0
    (table,) = (tmp_path / "run/run/samples").glob("step_*.jsonl")
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    template, whole = load_tokenizer(chat["model"]), 0
    for row, sequence, talk in zip(rows, columns["sequences"], columns["dialogues"], strict=True):
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"question {row['answer']}"}]
        for turn in row["turns"]:
            messages += [*(turn["observed"] or []), {"role": "assistant", "content": turn["text"]}]
        text = template.render(messages[:-1], None, {}, tools=None, reply=True) + messages[-1]["content"]
        assert file.decode(sequence, skip_special_tokens=False).rstrip("\N{REPLACEMENT CHARACTER}") == text
        assert talk["ended_by"] == row["ended_by"]
        assert bool(talk.get("opening")) is bool(args.get("begins"))
        whole += len(row["turns"]) == 3
    assert whole, "no conversation has all turns"
    write_report([tmp_path / "run/run"], tmp_path / "report.html", title="t")
    assert "[turn 2, reward" in (tmp_path / "report.html").read_text()


def scores_by_transformers(directory: Path, texts: list[str], *, bos: bool) -> list[float]:
    """Scores of a classifier with one label. `bos`: a text begins with it; a chat template would write it"""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    with torch.no_grad():
        return [float(model(**tokenizer(text, return_tensors="pt", add_special_tokens=bos)).logits) for text in texts]


def test_models_judge_the_whole_conversation(chat, vllm_ranks, tmp_path) -> None:
    """A classifier, and a reward model with a tokenizer of its own: as transformers on the text that the chat template
    writes, the actor's for the one, its own for the other. The environment's first answer is a text inside the turn."""
    plain = write_classifier(tmp_path / "plain", max_position_embeddings=1024)
    judge = write_classifier(
        tmp_path / "judge", tokenizer={"chat_template": CHAT_TEMPLATE}, max_position_embeddings=1024
    )
    rewards = [{"kind": "classifier", "path": str(plain)}, {"kind": "model", "retokenize": True}]
    cfg = tree(chat, {"inside": " and"}, rewards=rewards, samples={"every": 1, "count": 8})
    cfg["reward_model"] = {"model": {"path": str(judge)}}
    cfg["environment"]["history"] = "as_sampled"  # a turn may end with its end token
    cfg["data"]["template_may_drop"] = ["white_space"]
    run(vllm_ranks, 1, cfg, tmp_path / "run")
    (table,) = (tmp_path / "run/run/samples").glob("step_*.jsonl")
    rows, template = [json.loads(line) for line in table.read_text().splitlines()], load_tokenizer(chat["model"])
    joined, rendered = [], []
    for row in rows:
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"question {row['answer']}"}]
        for turn in row["turns"]:
            if isinstance(turn["observed"], str):
                messages[-1]["content"] += turn["observed"] + turn["text"]
            else:
                messages += [*(turn["observed"] or []), {"role": "assistant", "content": turn["text"]}]
        last, end = messages.pop()["content"], "</s>" * row["finished"]
        joined.append(template.render(messages, None, {}, tools=None, reply=True) + last + end)
        asked = "".join(f"[{m['role'][0]}]{m['content']}{'</s>' * (m['role'] == 'assistant')}" for m in messages)
        rendered.append(f"{asked}[a]{last}{end}")
    assert any(" and" in text for text in rendered)
    for name, directory, texts in (("classifier", plain, joined), ("model", judge, rendered)):
        expected = scores_by_transformers(directory, texts, bos=name == "classifier")
        assert [row["rewards"][name] for row in rows] == pytest.approx(expected, abs=1e-4), name
        assert max(expected) - min(expected) > 1e-2


def test_generate_writes_conversations_that_sft_learns_all_turns_of(chat, vllm_ranks, tmp_path) -> None:
    """The template asks with `<think>`, which belongs to the message later. Conversations of which the environment
    fails are not written, have no reward, and no part in the accuracy."""
    (tmp_path / "opened.jinja").write_text(OPENED)
    cfg = tree(chat, {"role": "tool", "fails": FAIL})
    cfg = {key: cfg[key] for key in ("actor", "data", "rollout", "environment", "rewards")}
    cfg["rollout"] |= {"num_samples_per_prompt": 1}
    cfg["environment"] |= {"on_failure": "drop"}
    cfg["data"] |= {"chat_template": str(tmp_path / "opened.jinja")}
    judged = {"kind": "rule", "name": "some", "rule": HERE + "some", "workers": 0, "check": "none"}
    cfg["rewards"] = [*cfg["rewards"], judged]
    vllm_ranks.run(
        1, "command", *argv_of("generate", {**cfg, "run": {"dir": str(tmp_path / "run")}}, tmp_path / "g.yaml")
    )
    lines = [json.loads(line) for line in (tmp_path / "run/responses.jsonl").read_text().splitlines()]
    figures = read_metrics(tmp_path / "run")[-1]
    assert len(lines) == 16 - len(FAIL) == 16 - figures["conversations_failed"]
    assert max(len(line["turn_rewards"]) for line in lines) == 3
    turns = [sum(message["role"] == "assistant" for message in line["messages"]) for line in lines]
    assert figures["turns_mean"] == (sum(turns) + 2 * len(FAIL)) / 16
    contents = [m["content"] for line in lines for m in line["messages"] if m["role"] == "assistant"]
    assert all(content.startswith("<think>\n") for content in contents)
    assert not {line["answer"] for line in lines} & set(FAIL)
    rewarded = [line["rewards"]["some"] for line in lines]
    assert {0.0, 1.0} == set(rewarded)
    assert figures["eval_some"] == sum(rewarded) / len(rewarded)
    assert figures["eval_some_failed"] == len(FAIL)
    sft = {
        "run": {"dir": str(tmp_path / "sft")},
        "actor": cfg["actor"],
        "data": {"train": str(tmp_path / "run/responses.jsonl"), "loss_on": "all", "chat_template": OPENED},
        "train": {"num_steps": 1, "mini_batch_samples": 4, "micro_batch_samples": 2},
    }
    vllm_ranks.run(1, "command", *argv_of("sft", sft, tmp_path / "sft.yaml"))
    assert read_metrics(tmp_path / "sft")[-1]["loss"] > 0
    evaluated = {**cfg, "rewards": cfg["rewards"][:1], "eval": {"accuracy": HERE + "some"}}
    evaluated["run"] = {"dir": str(tmp_path / "eval")}
    vllm_ranks.run(1, "command", *argv_of("eval", evaluated, tmp_path / "eval.yaml"))
    evaluation = read_metrics(tmp_path / "eval")[-1]
    assert evaluation["turns_mean"] == figures["turns_mean"]
    assert evaluation["eval_accuracy"] == pytest.approx(sum(rewarded) / len(rewarded))


def shown(runtime: Runtime, file: str) -> tuple[str, str]:
    """What is printed of a conversation at a terminal."""
    cfg = ask.with_room(load_config(AskConfig, file, ['prompts=["tell me"]']))
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        run_chat(cfg, runtime, cfg.actor.model.path)
    return out.getvalue(), err.getvalue()


def test_a_terminal_shows_turns_and_answers(chat, vllm_ranks, tmp_path) -> None:
    cfg = tree(chat)
    cfg = {key: cfg[key] for key in ("actor", "rollout", "environment")} | {"run": {"dir": str(tmp_path / "run")}}
    cfg["data"] = {"max_prompt_tokens": 80, "template": "chat"}
    cfg["rollout"] |= {"num_samples_per_prompt": 1}
    (tmp_path / "ask.yaml").write_text(yaml.safe_dump(cfg))
    out, err = vllm_ranks.run(1, shown, str(tmp_path / "ask.yaml"))[0]
    assert "    user: 0: " in out
    assert lines_naming(err, "ended by", "rewards")


def test_the_start_tries_the_template(chat, vllm_ranks, tmp_path) -> None:
    written = vllm_ranks.run(1, "command", *killed(tree(chat), tmp_path / "run"))[0]
    assert lines_naming(written, "environment", "chat template keeps the history")


REFUSED: dict[str, tuple[str, ...]] = {
    "no answer": ("returned 5 from step", "expected an Answer"),
    "a message in place of a list": ("expected a list of messages",),
    "an unknown role": ("umpire", "none that is usual"),
    "the assistant's role": ("role 'assistant'", "write as user or tool"),
    "no content": ("give each a role and a content",),
    "a reward that is no number": ("reward 'high'", "expected a number or None"),
    "not a number": ("nan", "expected a number that fp32 holds"),
    "what JSON cannot hold": ("JSON cannot hold",),
    "longer than the room": ("rollout.max_response_tokens", "messages of reset", "return less"),
}


def test_bad_answers_are_named_and_leave_nothing_in_the_bank(chat, vllm_ranks, tmp_path) -> None:
    for number, (how, words) in enumerate(REFUSED.items()):
        cfg = tree(chat, {"how": how})
        cfg["environment"] |= {"function": HERE + "Wrong", "on_failure": "stop"}
        ((status, written),) = vllm_ranks.run(1, failing_command, *killed(cfg, tmp_path / f"run{number}"))
        named = [words for words in words if words not in " ".join(written.split())]
        assert (status, named) == (2, []), (how, written[-2000:])
        records = [path.read_text() for path in (tmp_path / f"run{number}/bank").rglob("*.jsonl")]
        assert not any('"dialogue"' in text for text in records), how


def test_an_environment_without_end_is_ended_by_the_limits(chat, vllm_ranks, tmp_path) -> None:
    cfg = tree(chat, {"how": "without end"})
    cfg["environment"] |= {"function": HERE + "Wrong", "max_turns": 4}
    vllm_ranks.run(1, "command", *killed(cfg, tmp_path / "run"))
    found = read_metrics(tmp_path / "run")[1]
    assert found["ended_by/environment"] == found["ended_by/model"] == found["finished_fraction"] == 0
    assert found["ended_by/max_turns"] + found["ended_by/no_room"] + found["ended_by/turn_cut"] == 1


def test_a_template_that_cannot_do_it_ends_the_run_with_its_reason(chat, vllm_ranks, tmp_path) -> None:
    """One that leaves out the role `tool`, and one that changes the model's turn once another message follows."""
    start = "{% for m in messages %}{% if m['role'] != 'tool' %}<|im_start|>{{ m['role'] }}\n"
    asks = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    drops = start + "{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}" + asks
    turn = "{% set later = m['role'] == 'assistant' and not loop.last %}"
    turn += "{{ m['content'] | replace(' ', '_') if later else m['content'] }}"
    rewrites = start + turn + "<|im_end|>\\n{% endif %}{% endfor %}" + asks
    for name, template, words in (
        ("drops", drops, ("does not write the environment's message of 'tool'",)),
        ("rewrites", rewrites, ("writes the history otherwise", "environment.history: as_sampled")),
    ):
        cfg = tree(chat, {"role": "tool" if name == "drops" else "user"})
        cfg["data"]["chat_template"] = template
        ((status, written),) = vllm_ranks.run(1, failing_command, *killed(cfg, tmp_path / name))
        assert (status, [word for word in words if word not in " ".join(written.split())]) == (2, []), written[-3000:]
