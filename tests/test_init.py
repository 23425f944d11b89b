"""`megarlhf init`: what it writes passes `--dry-run` as it stands, for data of every kind, and says what is open. Not
covered: shapes of other frameworks (test_init_shapes.py), a GPU (its layouts are chosen by config.json alone), names of
the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarlhf.commands import cli
from megarlhf.provenance import Provenance, Weights
from tests.data.chat_styles import CHATML, write_chat_tokenizer
from tests.distributed.tiny import write_reward_model
from tests.refuses import missing_names
from tests.weights.cases import LLAMA_70B, TINY
from tools.demo.make_data import base_files

Rows = list[dict[str, Any]]
Capture = pytest.CaptureFixture[str]
SUMS = [(n, str(n + 1)) for n in range(10, 70)]


def said(capsys: Capture, *argv: object) -> tuple[int, str, str]:
    try:
        status = cli.main([str(word) for word in argv])
    except SystemExit as end:
        status = end.code  # type: ignore[assignment]
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def passes(capsys: Capture, *argv: object) -> str:
    status, out, err = said(capsys, *argv)
    assert (status, err) == (0, "")
    return out


def dry_run(capsys: Capture, command: str, file: object = None) -> tuple[dict[str, Any], str]:
    file = file or f"{command}.yaml"
    return yaml.safe_load(Path(str(file)).read_text()), passes(capsys, command, "-c", file, "--dry-run")


def write(rows: Rows, name: str = "data.jsonl") -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


KINDS: dict[str, tuple[Rows, list[str], str, Any]] = {
    "as we call them": ([{"prompt": f"{n}+1=", "response": a} for n, a in SUMS], [], "sft", "data.jsonl"),
    "as others do": ([{"question": f"{n}+1=", "completion": a} for n, a in SUMS], [], "sft",
                     {"path": "data.jsonl", "columns": {"prompt": "question", "response": "completion"}}),
    "alpaca": ([{"instruction": f"{n}+1=", "input": "", "output": a} for n, a in SUMS], [], "sft",
               {"path": "data.jsonl", "adapter": "alpaca"}),
    "answers learnt": ([{"problem": f"{n}+1=", "answer": a} for n, a in SUMS], ["--command", "sft"], "sft",
                       {"path": "data.jsonl", "columns": {"prompt": "problem", "response": "answer"}}),
    "answers compared": ([{"problem": f"{n}+1=", "answer": a} for n, a in SUMS], [], "rl",
                         {"path": "data.jsonl", "columns": {"prompt": "problem"}}),
    "pairs": ([{"prompt": f"{n}+1=", "chosen": a, "rejected": "7"} for n, a in SUMS], [], "rm", "data.jsonl"),
    "pairs for dpo": ([{"prompt": f"{n}+1=", "preferred": a, "worse": "7"} for n, a in SUMS],
                      ["--command", "dpo", "--nproc", "2"], "dpo",
                      {"path": "data.jsonl", "columns": {"chosen": "preferred", "rejected": "worse"}}),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_what_it_writes_passes_a_dry_run(kind: str, one_layer: dict[str, Path], capsys: Capture) -> None:
    rows, options, command, train = KINDS[kind]
    write(rows)
    out = passes(capsys, "init", "--model", one_layer["plain"], "--data", "data.jsonl", *options)
    assert out.startswith(f"wrote {command}.yaml, for `megarlhf {command}` on ")
    tree, out = dry_run(capsys, command)
    assert f"{command}: batch arithmetic" in out
    assert tree["data"]["train"] == train
    # "69+1=" is six tokens with the one that begins a text, "70" and the end are three.
    assert tree["data"]["max_prompt_tokens"] == 8
    assert tree["data"].get("max_response_tokens", 8) == 8
    assert tree["train"].get("prompts_per_step", tree["train"]["mini_batch_samples"]) == 6
    text = Path(f"{command}.yaml").read_text()
    assert "all 60 records: prompts of 6 tokens" in " ".join(text.replace("#", " ").split())


def test_few_rows_of_a_kind_of_file_that_does_not_say_how_many(one_layer: dict[str, Path], capsys: Capture) -> None:
    Path("data.csv").write_text("prompt,response\n" + "".join(f"{n}+1=,{a}\n" for n, a in SUMS[:40]))
    assert "was not counted" not in passes(capsys, "init", "--model", one_layer["plain"], "--data", "data.csv")
    tree, _ = dry_run(capsys, "sft")
    assert (tree["train"]["mini_batch_samples"], tree["train"]["num_steps"]) == (4, 30)


def turns(question: str, answer: str) -> list[dict[str, str]]:
    asked = [{"role": "system", "content": "be brief"}, {"role": "user", "content": question}]
    return [*asked, {"role": "assistant", "content": answer}]


SHAREGPT: Rows = [
    *[{"conversations": [{"from": "human", "value": f"{n}+1"}, {"from": "gpt", "value": a}]} for n, a in SUMS],
    {"conversations": []}, {"conversations": [{"from": "human", "value": "1+1"}]},
    {"conversations": [{"from": "gpt", "value": "so"}, {"from": "human", "value": "1+1"}]},
]  # fmt: skip
CONVERSATIONS: dict[str, tuple[Rows, str, str]] = {
    "messages": ([{"messages": turns(f"{n}+1", a)} for n, a in SUMS], "sft", "conversations in 'messages'"),
    "json": ([{"messages": json.dumps(turns(f"{n}+1", a))} for n, a in SUMS], "sft", "conversations in 'messages'"),
    "sharegpt": (SHAREGPT, "sft", "adapter sharegpt"),
    "ms-swift": ([{"messages": turns(f"{n}+1", a), "rejected_response": "no"} for n, a in SUMS], "rm", "ms_swift"),
    "to be answered": ([{"messages": turns(f"{n}+1", a)[:2], "answer": a} for n, a in SUMS], "rl", "conversations in"),
    "pairs": ([{"chosen": turns(f"{n}+1", a), "rejected": turns(f"{n}+1", "no")} for n, a in SUMS], "rm",
              "pairs of conversations"),
}  # fmt: skip


@pytest.mark.parametrize("kind", CONVERSATIONS)
def test_conversations(kind: str, capsys: Capture) -> None:
    """By the tokenizer's template, whose marks count. A model with heads of 16, which vLLM does not run on a CPU: the
    other engine, and that is said."""
    rows, command, read = CONVERSATIONS[kind]
    write(rows)
    out = passes(capsys, "init", *chat_model())
    text = Path(f"{command}.yaml").read_text()
    assert read in text
    assert "a chat template" in " ".join(text.replace("#", " ").split())
    tree, _ = dry_run(capsys, command)
    assert 25 < tree["data"]["max_prompt_tokens"] < 80
    if command == "rl":
        assert tree["rollout"]["engine"] == "megatron"
        assert not missing_names(out, "not decided: rollout.engine", "megatron", "vllm")


def chat_model(template: str = CHATML) -> tuple[str, ...]:
    write_chat_tokenizer(Path("model"), template)
    Path("model/config.json").write_text(json.dumps({**TINY, "vocab_size": 128, "max_position_embeddings": 512}))
    return "--model", "model", "--data", "data.jsonl", "--device", "cpu"


@pytest.mark.parametrize("earlier", [False, True])
def test_texts_for_a_chat_model(earlier: bool, capsys: Capture) -> None:
    """They are written with its template, and measured so: `<|im_start|>user`, a line break, `69+1=`, `<|im_end|>`, a
    line break, `<|im_start|>assistant` and a line break are 24 tokens. Not where an earlier run has trained it on
    texts as they stand."""
    write(KINDS["as we call them"][0])
    options = chat_model()
    if earlier:
        base = Weights(path="/base", digest="0", dtype="bfloat16")
        stated = Provenance(command="sft", role="actor", run="/r", step=1, base=base, writing={"texts": {"end": 2}})
        Path("model/megarlhf.json").write_text(stated.to_json())
    out = passes(capsys, "init", *options)
    data = dry_run(capsys, "sft")[0]["data"]
    assert (data.get("template"), data["max_prompt_tokens"]) == ((None, 8) if earlier else ("chat", 32))
    assert ("data.template = plain" in out) != earlier


def test_a_template_that_refuses_the_texts_is_not_recommended(capsys: Capture) -> None:
    write(KINDS["as we call them"][0])
    out = passes(capsys, "init", *chat_model("{{ raise_exception('a system message is needed') }}"))
    assert not missing_names(out, "chat template", "a system message is needed")
    assert "template" not in yaml.safe_load(Path("sft.yaml").read_text())["data"]


def test_a_share_for_validation_and_for_what_is_skipped(capsys: Capture) -> None:
    """Of 200 records and more. What is written allows what was seen to be skipped, and says so."""
    rows = [{"prompt": f"{n}+1=", "response": "" if n % 5 == 0 else str(n + 1)} for n in range(400)]
    write(rows)
    out = passes(capsys, "init", *chat_model())
    assert not missing_names(out, "not decided: data.max_skipped", "20 %")
    tree, out = dry_run(capsys, "sft")
    assert (tree["data"]["validation_share"], tree["data"]["max_skipped"]) == (0.05, 0.22)
    assert not missing_names(out, "data.validation_share = 0.05", "16 samples")


def test_a_learned_reward(one_layer: dict[str, Path], capsys: Capture, tmp_path: Path) -> None:
    write([{"prompt": f"{n}+1="} for n, _ in SUMS], "prompts.jsonl")
    given = ("init", "--model", one_layer["plain"], "--data", "prompts.jsonl")
    status, _, err = said(capsys, *given)
    assert status == 2
    assert not missing_names(err, "rl needs a reward", "'answer'", "--reward-model DIR")
    judge = write_reward_model(tmp_path / "judge", one_layer["plain"])
    capsys.readouterr()
    out = passes(capsys, *given, "--reward-model", judge, "-o", "with/judge.yaml")
    assert not missing_names(out, "not decided: rollout.max_response_tokens")
    assert dry_run(capsys, "rl", "with/judge.yaml")[0]["rewards"] == [{"kind": "model"}]


def test_nothing_is_overwritten(one_layer: dict[str, Path], capsys: Capture) -> None:
    write(KINDS["as we call them"][0])
    Path("sft.yaml").write_text("mine")
    (Path("runs") / "sft").mkdir(parents=True)
    status, _, err = said(capsys, "init", "--model", one_layer["plain"], "--data", "data.jsonl")
    assert (status, err.count("\n"), missing_names(err, "megarlhf init: sft.yaml", "-o")) == (2, 1, [])
    assert Path("sft.yaml").read_text() == "mine"
    passes(capsys, "init", "--model", one_layer["plain"], "--data", "data.jsonl", "-o", "other.yaml")
    assert yaml.safe_load(Path("other.yaml").read_text())["run"]["dir"] == "runs/sft-2"


def test_long_records_and_the_model_s_positions(one_layer: dict[str, Path], capsys: Capture) -> None:
    rows = [{"prompt": "1+" * (400 if n == 7 else 20) + "=", "response": "5"} for n in range(60)]
    write(rows)
    out = passes(capsys, "init", "--model", one_layer["plain"], "--data", "data.jsonl")
    assert not missing_names(out, "not decided: 1 of the 60 records", "512 tokens", "data.over_long = cut")
    data = dry_run(capsys, "sft")[0]["data"]
    assert data["max_prompt_tokens"] + data["max_response_tokens"] == 512


@pytest.mark.parametrize("ranks, layout, run", [
    (8, {"tp": 8, "pp": 1, "sequence_parallel": True}, {"nproc": 8}),
    (64, {"tp": 8, "pp": 2, "sequence_parallel": True}, {"nproc": 8, "world_size": 64}),
])  # fmt: skip
def test_a_layout_for_gpus_that_are_told(ranks: int, layout: dict[str, Any], run: Any, capsys: Capture) -> None:
    """70 B parameters: 18 bytes each on one rank; on 64 GPUs 6 + 12 / 4 at TP8 x PP2 are 37 GiB. On eight nothing fits,
    which is said, as are weights that are not there."""
    Path("big").mkdir()
    Path("big/config.json").write_text(json.dumps({**LLAMA_70B, "dtype": "bfloat16"}))
    Path("big/tokenizer.model").write_bytes(base_files()["tokenizer.model"])
    write(KINDS["as we call them"][0])
    out = passes(capsys, "init", "--model", "big", "--data", "data.jsonl", "--device", "gpu", "--nproc", ranks)
    tree = yaml.safe_load(Path("sft.yaml").read_text())
    assert tree["actor"]["parallel"] == layout
    assert tree["run"] == {"dir": "runs/sft", **run}
    assert tree["actor"]["model"]["random_init"] is True
    assert ("not decided: weights, gradients and optimizer states" in out) == (ranks == 8)
    assert not missing_names(
        out, "not decided: the memory of a GPU", "80 GiB", "not decided: the weights", "big has none"
    )
    assert "next: megarlhf sft -c sft.yaml --dry-run\nand: megarlhf rehearse sft -c sft.yaml" in out


def test_what_it_cannot_use_is_told(one_layer: dict[str, Path], capsys: Capture) -> None:
    model = one_layer["plain"]
    write(KINDS["as we call them"][0])
    write([{"x": 1, "y": "2"}], "strange.jsonl")
    write([], "number.jsonl")
    write([{"prompt": "1+1=", "response": " "}] * 5, "void.jsonl")
    Path("empty").mkdir()
    Path("split").mkdir()
    for name in ("train", "test"):
        write(KINDS["as we call them"][0], f"split/{name}.jsonl")
    for options, names in (
        (["--model", model, "--data", "dta.jsonl"], "no such data file|dta.jsonl|nearest name"),
        (["--model", model, "--data", "strange.jsonl"], "'x', 'y'|no command"),
        (["--model", model, "--data", "number.jsonl"], "no rows|number.jsonl"),
        (["--model", model, "--data", "void.jsonl"], "5 empty response"),
        (["--model", model, "--data", "split"], "only one|test, train"),
        (["--model", "empty", "--data", "data.jsonl"], "empty|config.json"),
        (["--model", model, "--data", "data.jsonl", "--command", "rm"], "no field 'chosen'|found 'prompt', 'response'"),
        (["--model", model, "--data", "data.jsonl", "--device", "gpu"], "--nproc"),
        (["--model", model], "--data"),
    ):
        status, _, err = said(capsys, "init", *options)
        assert (status, err.count("\n"), missing_names(err, *names.split("|"))) == (2, 1, []), err
    assert not list(Path().glob("*.yaml"))
    passes(capsys, "init", "--model", model, "--data", "split", "--split", "train")
    assert yaml.safe_load(Path("sft.yaml").read_text())["data"]["train"] == {"path": "split", "split": "train"}


def test_answers_that_are_whole_solutions(one_layer: dict[str, Path], capsys: Capture) -> None:
    """As in GSM8K: the rule reads what they end with, and the file says so."""
    rows = [{"question": f"{n}+1=", "answer": f"We add 1 to {n}.\n#### {a}"} for n, a in SUMS]
    write(rows)
    out = passes(capsys, "init", "--model", one_layer["plain"], "--data", "data.jsonl")
    assert not missing_names(out, "not decided: rewards", "numeric_match")
    assert dry_run(capsys, "rl")[0]["rewards"] == [{"kind": "rule", "rule": "numeric_match"}]
