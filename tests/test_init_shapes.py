"""`megarlhf init` on rows as the documentation of other frameworks shows them: it writes columns, adapter and template
by which they pass a dry run; rows of which no command learns are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.data.chat_styles import CHATML
from tests.refuses import missing_names
from tests.test_init import SUMS, Rows, chat_model, dry_run, passes, said, write


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def verl(n: int, a: str) -> dict[str, Any]:
    return {
        "data_source": "sums", "prompt": [user(f"{n}+1")], "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": a},
        "extra_info": {"split": "train", "index": n, "answer": f"it is {a}", "question": f"{n}+1"},
    }  # fmt: skip


SHAPES: dict[str, tuple[Rows, str, dict[str, Any]]] = {
    "verl": ([verl(n, a) for n, a in SUMS], "rl", {"columns": {"answer": "reward_model.ground_truth"}}),
    "OpenRLHF's prompts": ([{"context_messages": [user(f"{n}+1")], "label": a} for n, a in SUMS], "rl",
                           {"columns": {"prompt": "context_messages", "answer": "label"}}),
    "OpenRLHF's examples": ([{"input": f"{n}+1", "output": a} for n, a in SUMS], "sft",
                            {"columns": {"prompt": "input", "response": "output"}, "template": "chat"}),
    "TRL's conversational completions": ([{"prompt": [user(f"{n}+1")],
    "completion": [answer(a)]} for n, a in SUMS], "sft",
                                         {"columns": {"response": "completion"}}),
    "TRL's completions of several answers": (
        [{"prompt": [user("1")], "completion": [answer(a), user(f"{n}"), answer(a)]} for n, a in SUMS], "sft",
        {"columns": {"response": "completion"}, "loss_on": "all"}),
    "TRL's texts": ([{"text": f"{n}+1={a}"} for n, a in SUMS], "sft", {}),
    "TRL's pairs without a prompt": ([{"chosen": f"{n}+1 is {a}", "rejected": f"{n}+1 is 7"} for n, a in SUMS], "rm",
                                     {"adapter": "implicit_prompt", "template": "chat"}),
    "LLaMA-Factory's pairs": ([
        {"conversations": [{"from": "human", "value": f"{n}+1"}],
         **{k: {"from": "gpt", "value": v} for k, v in (("chosen", a), ("rejected", "7"))}}
        for n, a in SUMS], "rm", {}),
    "alpaca with history": (
        [{"instruction": f"{n}+1", "input": "", "output": a, "history": [["1", "2"]]} for n, a in SUMS], "sft",
        {"adapter": "alpaca", "loss_on": "last"}),
    "ms-swift's query": ([{"system": "", "query": f"{n}+1", "response": a, "history": []} for n, a in SUMS], "sft",
                         {"adapter": "alpaca", "template": "chat"}),
    "Dolly": ([{"instruction": "Add.", "context": f"{n}+1", "response": a, "category": "sums"} for n, a in SUMS], "sft",
              {"adapter": "alpaca", "template": "chat"}),
    "an object of lists": (
        [{"messages": {"role": ["user", "assistant"], "content": [f"{n}+1", a]}} for n, a in SUMS], "sft", {}),
    "RLVR": ([{"messages": [user(f"{n}+1")], "ground_truth": a, "dataset": "x"} for n, a in SUMS], "rl",
             {"columns": {"answer": "ground_truth"}}),
    "OpenOrca": ([{"system_prompt": "be brief", "question": f"{n}+1", "response": a} for n, a in SUMS], "sft",
                 {"columns": {"prompt": "question", "system": "system_prompt"}, "template": "chat"}),
}  # fmt: skip


@pytest.mark.parametrize("kind", SHAPES)
def test_shapes_of_other_frameworks(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows, command, expected = SHAPES[kind]
    write(rows)
    out = passes(capsys, "init", *chat_model())
    data = dry_run(capsys, command)[0]["data"]
    source = data["train"] if isinstance(data["train"], dict) else {}
    keys = ("template", "loss_on")
    found = {key: value for key, value in {**source, **data}.items() if key in ("columns", "adapter", *keys)}
    assert found == expected
    several = kind == "alpaca with history"
    assert ("not decided: data.loss_on: 60 of 60 conversations" in out) == several


@pytest.mark.parametrize("row, names", [
    ({"prompt": "1+1", "completions": ["2"], "labels": [True]}, "(PRM)|no command"),
    ({"prompt": "1+1", "response_0": "3", "response_1": "2", "better_response_id": 1},
     "response_0, response_1|an adapter of yours"),
    ({"question": "1+1", "response_j": "2", "response_k": "3"}, "response_j, response_k"),
    ({"text": "Add one and one.", "code": "print(1 + 1)"}, "'code' = 'print(1 + 1)'"),
    ({"messages": [user("1+1"), answer(" 2 ")]}, "data.template_may_drop: [white_space]"),
    ({"messages": [user("1+1"), {**answer(""), "tool_calls": [{"name": "f", "parameters": {}}]}]},
     "keys 'name', 'parameters'"),
])  # fmt: skip
def test_rows_that_are_refused(row: dict[str, Any], names: str, capsys: pytest.CaptureFixture[str]) -> None:
    write([row] * 5)
    status, _, err = said(capsys, "init", *chat_model(CHATML.replace("m.content", "m.content | trim")))
    assert (status, err.count("\n"), missing_names(err, *names.split("|"))) == (2, 1, []), err
    assert (not missing_names(err, "init", "a file of configs/")) == ("data." in names)
    assert not list(Path().glob("*.yaml"))
