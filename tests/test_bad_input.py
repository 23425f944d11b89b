"""What is typed wrong, one case a row: what is said, once, before a rank starts or a file is written. Each case is a
dry run of a command that would run but for the one mistake. Not covered: what only ranks can see (a GPU's memory, nodes
that differ: tests/planning/test_nodes.py), and layouts (tests/planning/test_illegal_layouts.py)."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
import yaml
from pyarrow import csv

from megarlhf.commands import cli, launch
from tests.distributed.tiny import write_tiny_llama
from tests.refuses import missing_names

Runs = Callable[..., str]
Capture = pytest.CaptureFixture[str]

ROWS = [{"prompt": f"{n}+1=", "response": str(n + 1), "answer": str(n + 1)} for n in range(10, 42)]
PAIRS = [{"prompt": row["prompt"], "chosen": row["response"], "rejected": "7"} for row in ROWS]
TALK = [{"role": "user", "content": "37+1="}, {"role": "assistant", "content": "38"}]


def write_lines(path: Path, rows: Any) -> None:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a good model, good data of each kind, and much that is not good."""
    root = tmp_path_factory.mktemp("bad")
    write_tiny_llama(root / "model", seed=0, num_layers=1)
    write_lines(root / "sft.jsonl", ROWS)
    write_lines(root / "pairs.jsonl", PAIRS)
    _write_bad_data(root)
    _write_bad_models(root)
    (root / "file").write_text("")
    return root


def _write_bad_data(root: Path) -> None:
    (root / "empty.jsonl").write_text("")
    (root / "blank.jsonl").write_text("\n\n\n")
    write_lines(root / "others.jsonl", [{"question": row["prompt"], "reply": row["response"]} for row in ROWS])
    write_lines(root / "broken.jsonl", [*map(json.dumps, ROWS[:2]), '{"prompt": "1+1=", "response": "2"'])
    write_lines(root / "twice.jsonl", ['{"prompt": "1", "prompt": "2", "response": "3"}'])
    (root / "latin.jsonl").write_bytes('{"prompt": "caf\xe9", "response": "1"}\n'.encode("latin-1"))
    write_lines(root / "numbers.jsonl", [{"prompt": 12, "response": 13}])
    write_lines(root / "nulls.jsonl", [{"prompt": "1+1=", "response": None}])
    write_lines(root / "long.jsonl", [{"prompt": "1" * 5000, "response": "2"}] * 16)
    write_lines(root / "few.jsonl", ROWS[:3])
    write_lines(root / "equal.jsonl", [{"prompt": "1+1=", "chosen": "2", "rejected": "2"}] * 16)
    write_lines(root / "no_answer.jsonl", [{"prompt": row["prompt"]} for row in ROWS])
    write_lines(root / "words.jsonl", [{"prompt": row["prompt"], "answer": "many"} for row in ROWS])
    (root / "table.xlsx").write_bytes(b"PK\x03\x04")
    (root / "broken.parquet").write_bytes(b"PAR1 and nothing else")
    talks = {
        "answered": TALK, "unanswered": TALK[:1],
        "misspelt": [{"role": "user", "content": "1"}, {"role": "asistant", "content": "2"}],
        "turns": [TALK[1], TALK[0], TALK[1]], "no_content": [{"role": "user"}, TALK[1]],
        "number": [{"role": "user", "content": 5}, TALK[1]], "nobody": [],
    }  # fmt: skip
    for name, talk in talks.items():
        write_lines(root / f"talk_{name}.jsonl", [{"messages": talk}] * 16)
    for name in ("splits", "mixed"):
        (root / name).mkdir()
    for split in ("train", "test"):
        write_lines(root / "splits" / f"{split}.jsonl", ROWS)
    write_lines(root / "mixed" / "a.jsonl", ROWS)
    write_lines(root / "mixed" / "b.jsonl", PAIRS)
    (root / "nothing").mkdir()
    _write_each_format(root)


def _write_each_format(root: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    csv.write_csv(table, root / "rows.csv")
    (root / "rows.json").write_text(json.dumps(ROWS))
    (root / "rows.jsonl.gz").write_bytes(gzip.compress((root / "sft.jsonl").read_bytes()))
    with pa.ipc.new_file(root / "rows.arrow", table.schema) as out:
        out.write_table(table)
    datasets.Dataset.from_list(ROWS).save_to_disk(root / "saved")


def _write_bad_models(root: Path) -> None:
    def copy(name: str) -> Path:
        return Path(shutil.copytree(root / "model", root / name))

    def change(path: Path, **keys: Any) -> None:
        tree = json.loads(path.read_text())
        for key, value in keys.items():
            tree.pop(key, None) if value is None else tree.update({key: value})
        path.write_text(json.dumps(tree))

    weights = copy("cut") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64])
    (copy("no_weights") / "model.safetensors").unlink()
    for tokenizer in copy("no_tokenizer").glob("*token*"):
        tokenizer.unlink()
    change(copy("unknown") / "config.json", model_type="megallama")
    change(copy("wider") / "config.json", hidden_size=128)
    change(copy("deeper") / "config.json", num_hidden_layers=7)
    (copy("no_json") / "config.json").write_text("{")
    (root / "adapter").mkdir()


@pytest.fixture
def say(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> Runs:
    """Runs a command that is good but for `changes`, dry; returns what it says, and has looked that it is one sentence
    of one line with status 2, that nothing has started, and that nothing was written."""
    started: list[str] = []
    monkeypatch.setattr(launch, "local_ranks", lambda *given: started.append("ranks"))
    monkeypatch.setattr(launch, "as_rank", lambda *given, **options: started.append("rank"))
    for name in [name for name in os.environ if name.startswith("SLURM_")] + ["RANK", "WORLD_SIZE", launch.MARK]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(work)

    def run(command: str, *changes: str, text: str | None = None) -> str:
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(good(command, tmp_path)) if text is None else text)
        before = sorted(str(each) for each in work.rglob("*"))
        status = cli.main([command, "-c", str(path), *changes, "--dry-run"])
        captured = capsys.readouterr()
        assert status == 2, captured.out
        assert captured.err.startswith(f"megarlhf {command}: ")
        assert len(captured.err.splitlines()) == 1, captured.err
        assert "Traceback" not in captured.err
        assert started == []
        assert not (tmp_path / "run").exists()
        assert sorted(str(each) for each in work.rglob("*")) == before
        return captured.err

    return run


def good(command: str, tmp_path: Path) -> dict[str, Any]:
    """A configuration without a mistake, in the directory `work`."""
    model = {"model": {"path": "model"}}
    tree: dict[str, Any] = {"run": {"dir": str(tmp_path / "run")}}
    if command in ("generate", "eval"):
        data = {"train": "sft.jsonl", "max_prompt_tokens": 16}
        rewards = [{"kind": "rule", "rule": "exact_match"}]
        return tree | {"actor": model, "data": data, "rewards": rewards, "rollout": {"max_response_tokens": 8}}
    tree["train"] = {"num_steps": 4, "mini_batch_samples": 8, "micro_batch_samples": 2}
    tree["reward_model" if command == "rm" else "actor"] = model
    tree["data"] = {"train": "pairs.jsonl" if command in ("rm", "dpo") else "sft.jsonl", "max_prompt_tokens": 16}
    if command == "dpo":
        tree["reference"] = model
    if command == "rl":
        tree["train"]["prompts_per_step"] = 8
        tree |= {"rollout": {"max_response_tokens": 8, "num_samples_per_prompt": 2}, "algo": {"advantage": "grpo"}}
        tree["rewards"] = [{"kind": "rule", "rule": "exact_match"}]
    return tree


CHATML = "data.chat_template=" + json.dumps(
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

REFUSES = "data.chat_template=" + json.dumps("{{ raise_exception('no') }}")
SECTIONS = "run: {dir: a}\nactor: {model: {path: model}}\n"
BATCHES = "train: {num_steps: 1, mini_batch_samples: 1, micro_batch_samples: 1}\n"
FILES = {
    "all but a section": (SECTIONS + BATCHES, "missing key 'data'"), "a list": ("- run\n", "mapping|list"),
    "no YAML": ("run: [\n", "not valid YAML"),
    "a key twice": ("run: {dir: a}\nrun: {dir: b}\n", "the key 'run'|line 1|line 2"),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_a_bad_file(case: str, say: Runs) -> None:
    text, names = FILES[case]
    assert not missing_names(say("sft", text=text), *names.split("|"))


CASES: list[tuple[str, str, list[str], str]] = [
    ("section misspelt", "sft", ["trian.num_steps=3"], "unknown key 'trian'|'train'"),
    ("key misspelt", "sft", ["actor.optim.learning_rate=1"], "unknown key 'actor.optim.learning_rate'"),
    ("role misspelt", "rl", ["crtic={model: {path: model}}"], "'crtic'|'critic'"),
    ("role of another command", "sft", ["critic={model: {path: model}}"], "unknown key 'critic'"),
    ("no number", "sft", ["train.num_steps=many"], "train.num_steps|'many'"),
    ("not a number", "sft", ["actor.optim.lr=.nan"], "actor.optim.lr|nan"),
    ("below its least", "sft", ["train.num_steps=0"], "train.num_steps|0"),
    ("a choice misspelt", "rl", ["algo.advantage=grop"], "'grop'|'grpo'"),
    ("an override without a value", "sft", ["train.num_steps"], "'train.num_steps'|section.key=value"),
    ("an override that is no YAML", "sft", ["train.num_steps=[1"], "'[1'|not valid YAML|quote"),
    ("both ways of batching", "sft", ["train.max_tokens_per_micro_batch=64"],
     "max_tokens_per_micro_batch = 64|one of them"),
    ("no way of batching", "sft", ["train.micro_batch_samples="], "micro_batch_samples = None|one of them"),
    ("batch that does not divide", "sft", ["train.micro_batch_samples=3"], "train.mini_batch_samples = 8|multiple"),
    ("samples that do not divide", "rl", ["train.prompts_per_step=7"], "train.prompts_per_step|multiple"),
    ("least above most learning rate", "sft", ["actor.optim.min_lr=1", "actor.optim.schedule=cosine"],
     "min_lr = 1|lr = 1e-06"),
    ("warm-up longer than the run", "sft", ["actor.optim.warmup_steps=9"], "warmup_steps"),
    ("more samples than data", "sft", ["train.mini_batch_samples=64"], "train.mini_batch_samples = 64|sft.jsonl"),
    ("more prompts than data", "rl", ["train.prompts_per_step=64"], "train.prompts_per_step = 64|sft.jsonl"),
    *((f"more samples than {name}", "sft", [f"data.train={name}", "train.mini_batch_samples=64"], f"32 records|{name}")
      for name in ("rows.csv", "rows.json", "rows.jsonl.gz", "rows.arrow", "saved")),
    ("more samples than a set of a mixture", "sft",
     ["data.train=[{path: sft.jsonl, weight: 1}, {path: few.jsonl, weight: 1}]"],
     "train.mini_batch_samples = 8|few.jsonl|4 samples|1 of 2|3 records"),
    ("all too long", "sft", ["data.train=long.jsonl"], "long.jsonl|16 of 16 records|longer than 16 tokens: 16"),
    ("pairs that are equal", "rm", ["data.train=equal.jsonl"],
     "equal.jsonl|16 of 16 records|chosen equals rejected: 16"),
    ("no such data", "sft", ["data.train=sfd.jsonl"], "sfd.jsonl|nearest name"),
    ("empty data", "sft", ["data.train=empty.jsonl"], "no rows|empty.jsonl"),
    ("only blank lines", "sft", ["data.train=blank.jsonl"], "no rows|blank.jsonl"),
    ("empty directory", "sft", ["data.train=nothing"], "no data files|nothing"),
    ("missing columns", "sft", ["data.train=others.jsonl"], "'prompt'|'question'"),
    ("pairs for sft", "sft", ["data.train=pairs.jsonl"], "'response'|'chosen'"),
    ("sft for pairs", "rm", ["data.train=sft.jsonl"], "'chosen'|'response'"),
    ("a broken line", "sft", ["data.train=broken.jsonl"], "broken.jsonl, line 3"),
    ("a key twice in a record", "sft", ["data.train=twice.jsonl"], "twice.jsonl, line 1|'prompt'"),
    ("not UTF-8", "sft", ["data.train=latin.jsonl"], "latin.jsonl, line 1|UTF-8"),
    ("numbers for texts", "sft", ["data.train=numbers.jsonl"], "numbers.jsonl, line 1|int 12"),
    ("null for a text", "sft", ["data.train=nulls.jsonl"], "nulls.jsonl, line 1|null"),
    ("an unknown kind of file", "sft", ["data.train=table.xlsx"], "table.xlsx|format"),
    ("no Parquet", "sft", ["data.train=broken.parquet"], "broken.parquet|readable .parquet"),
    ("several splits", "sft", ["data.train=splits"], "splits|several splits"),
    ("no such split", "sft", ["data.train={path: splits, split: dev}"], "no split 'dev'"),
    ("split of a file", "sft", ["data.train={path: sft.jsonl, split: train}"], "sft.jsonl|no split 'train'"),
    ("kinds that are mixed", "sft", ["data.train=mixed"], "mixed|different kinds"),
    ("trained on held-out data", "sft", ["data.train=mixed/a.jsonl", "data.validation=[mixed/a.jsonl, sft.jsonl]"],
     "data.train|data.validation|mixed/a.jsonl|held-out"),
    ("column that is not there", "sft", ["data.train={path: sft.jsonl, columns: {prompt: question}}"], "'question'"),
    ("unknown adapter of data", "sft", ["data.train={path: sft.jsonl, adapter: alpacca}"], "'alpacca'"),
    ("no answer for the rule", "rl", ["data.train=no_answer.jsonl"], "answer|exact_match"),
    ("answer that is no number", "rl", ["data.train=words.jsonl", "rewards=[{kind: rule, rule: numeric_match}]"],
     "numeric_match|'many'"),
    ("chat without a template", "sft", ["data.train=talk_answered.jsonl"], "template"),
    ("template that fails", "sft", ["data.train=talk_answered.jsonl", REFUSES], "refuses the messages"),
    ("template that is none", "sft", ["data.train=talk_answered.jsonl", "data.chat_template='{% if %}'"],
     "chat template|TemplateSyntaxError"),
    ("role misspelt in a talk", "sft", ["data.train=talk_misspelt.jsonl", CHATML], "'asistant'"),
    ("message without content", "sft", ["data.train=talk_no_content.jsonl", CHATML], "content|None"),
    ("content that is no text", "sft", ["data.train=talk_number.jsonl", CHATML], "content|int 5"),
    ("no messages", "sft", ["data.train=talk_nobody.jsonl", CHATML], "messages"),
    ("talk without an answer for sft", "sft", ["data.train=talk_unanswered.jsonl", CHATML], "assistant"),
    ("talk with an answer for rl", "rl", ["data.train=talk_answered.jsonl", CHATML], "ends with|'assistant'"),
    ("no such model", "sft", ["actor.model.path=modle"], "modle does not exist"),
    ("weights cut", "sft", ["actor.model.path=cut"], "cut/model.safetensors"),
    ("no weights", "sft", ["actor.model.path=no_weights"], "no_weights"),
    ("no tokenizer", "sft", ["actor.model.path=no_tokenizer"], "no tokenizer|no_tokenizer"),
    ("unknown family", "sft", ["actor.model.path=unknown"], "'megallama'"),
    ("config.json of a wider model", "sft", ["actor.model.path=wider"], "wider"),
    ("config.json of a deeper model", "sft", ["actor.model.path=deeper"], "deeper"),
    ("config.json that is no JSON", "sft", ["actor.model.path=no_json"], "no_json/config.json"),
    ("language model as a reward model", "rl", ["reward_model={model: {path: model}}", "rewards=[{kind: model}]"],
     "no scalar head"),
    ("more tokens than positions", "rl", ["rollout.max_response_tokens=600"], "max_position_embeddings = 512"),
    ("run directory that is a file", "sft", ["run.dir=file"], "file"),
    ("run directory in a file", "sft", ["run.dir=file/run"], "file/run"),
    ("a rule that is not there", "rl", ["rewards=[{kind: rule, rule: exact_mach}]"], "'exact_mach'|'exact_match'"),
    ("a module that is not there", "rl", ["rewards=[{kind: rule, rule: 'my_rules:f'}]"], "'my_rules:f'"),
    ("no reward", "rl", ["rewards=[]"], "rewards"),
    ("adapter of means of scores", "rm", ["loss=response_mean", "reward_model.lora={rank: 2, export: both}"],
     "PEFT adapter|mean over the response"),
    ("adapter directory without an adapter", "sft", ["actor.lora={path: adapter}"], "adapter"),
    ("unknown kind of evaluation", "sft", ["eval.max_samples=0"], "eval.max_samples"),
    ("no critic for values", "rl", ["algo.advantage=gae"], "critic"),
    ("a group of one", "rl", ["rollout.num_samples_per_prompt=1"], "num_samples_per_prompt"),
    ("a group of equal samples", "generate", ["rollout.num_samples_per_prompt=4"], "4 equal responses"),
]  # fmt: skip


@pytest.mark.parametrize("command, changes, names", [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_bad_case(command: str, changes: list[str], names: str, say: Runs) -> None:
    assert not missing_names(say(command, *changes), *names.split("|"))


@pytest.fixture
def runs_dry(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> Runs:
    monkeypatch.chdir(work)

    def run(command: str, *changes: str) -> str:
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(good(command, tmp_path)))
        status = cli.main([command, "-c", str(tmp_path / "config.yaml"), *changes, "--dry-run"])
        captured = capsys.readouterr()
        assert status == 0, captured.err
        return captured.out

    return run


@pytest.mark.parametrize("command", sorted({command for _, command, _, _ in CASES}))
def test_each_command_runs_without_the_mistake(command: str, runs_dry: Runs) -> None:
    """Or the cases above would say nothing about the mistake."""
    runs_dry(command)


@pytest.mark.parametrize("name", ["rows.csv", "rows.json", "rows.jsonl.gz", "rows.arrow", "saved", "sft.jsonl"])
def test_as_many_samples_as_there_are_records_pass(name: str, runs_dry: Runs) -> None:
    runs_dry("sft", f"data.train={name}", "train.mini_batch_samples=32")


def test_first_records_that_cannot_be_used_are_said_where_others_follow(runs_dry: Runs, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    write_lines(rows, [{"prompt": "1" * 50, "response": "2"}] * 64 + ROWS)
    out = runs_dry("sft", f"data.train={rows}", "data.max_skipped=0.9")
    assert not missing_names(out, "first 64 records", "skipped 64 of 64 records", "longer than 16 tokens: 64")
