"""`megarlhf generate` at a terminal: prompts of the command line, and lines that are typed. Nothing is written.

Not covered: a terminal's own behaviour (lines come from a stream here).
"""

import contextlib
import io
import json
import sys
from pathlib import Path
from unittest import mock

import pytest
import yaml

from megarlhf.commands import chat as ask
from megarlhf.commands import cli
from megarlhf.config import load_config
from megarlhf.config.ask import AskConfig
from megarlhf.config.load import config_of
from megarlhf.provenance import FILE as PROVENANCE
from megarlhf.provenance import Provenance, Weights
from megarlhf.runtime import Runtime
from megarlhf.trainers.generation.chat import run
from tests.chat_model import write_chat_model
from tests.refuses import missing_names


@pytest.fixture
def file(one_layer, tmp_path) -> Path:
    tree = {
        "run": {"dir": str(tmp_path / "run"), "seed": 3},
        "actor": {"model": {"path": str(one_layer["plain"])}},
        "rollout": {"engine": "megatron", "max_response_tokens": 5},
    }
    (tmp_path / "ask.yaml").write_text(yaml.safe_dump(tree))
    return tmp_path / "ask.yaml"


def test_prompts_of_the_command_line_get_what_a_file_of_them_gets(file, ranks, tmp_path) -> None:
    """On two ranks, one says it. The file's data, rewards and `out` play no part."""
    prompts = ["1+2=", "37+48="]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    asked = [word for text in prompts for word in ("--prompt", text)]
    layout = "actor.parallel.tp=2"
    unread = ["data.train=nowhere.jsonl", "rewards=[{kind: rule, rule: exact_match}]", f"out={tmp_path / 'x'}"]
    first, second = ranks.run(2, "command", "generate", "-c", str(file), layout, *asked, *unread)
    assert not (tmp_path / "run").exists()
    data = [f"data.train={tmp_path / 'prompts.jsonl'}", "data.max_prompt_tokens=16"]
    ranks.run(2, "command", "generate", "-c", str(file), layout, *data)
    lines = [json.loads(line) for line in (tmp_path / "run" / "responses.jsonl").read_text().splitlines()]
    read_as, *said = [line for line in first.splitlines() if not line.startswith("[rank")]
    assert read_as == "prompts: texts as they stand"
    assert [line for line in said if "cut at" not in line] == [line["response"] for line in lines]
    assert len([line for line in said if "cut at" in line]) == sum(not line["finished"] for line in lines)
    assert second == ""


@pytest.mark.parametrize("name", ["texts", "chat"])
def test_a_model_alone_gets_what_a_file_would_say(name, one_layer, ranks, tmp_path, monkeypatch) -> None:
    """By its chat template if it has one; lengths fit its positions; nothing is written."""
    model = one_layer["plain"] if name == "texts" else write_chat_model(tmp_path / "model")
    (tmp_path / "empty").mkdir()
    options = ["--prompt", "1+2=", "rollout.engine=megatron", "rollout.max_response_tokens=5"]
    template = "plain" if name == "texts" else "chat"
    tree = {"run": {"dir": str(tmp_path / "run")}, "actor": {"model": {"path": str(model)}}}
    (tmp_path / "file.yaml").write_text(yaml.safe_dump(tree | {"data": {"template": template}}))
    monkeypatch.chdir(tmp_path / "empty")
    (alone,) = ranks.run(1, "command", "generate", "--model", str(model), *options)
    (by_file,) = ranks.run(1, "command", "generate", "-c", str(tmp_path / "file.yaml"), *options)
    assert alone == by_file
    assert not missing_names(alone, "texts as they stand" if name == "texts" else "chat template")
    assert not list((tmp_path / "empty").iterdir())


def test_defaults_of_a_model_alone(tmp_path) -> None:
    """Overrides win. A model that has learnt texts alone in an earlier run is given texts."""
    model = write_chat_model(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))

    def lengths(*overrides: str) -> tuple[str, int, int]:
        cfg = ask.with_room(ask.with_defaults(config_of(AskConfig, ask.tree_of(model), overrides)))
        return cfg.data.template, cfg.data.max_prompt_tokens, cfg.rollout.max_response_tokens

    assert lengths() == ("chat", 32, 32)
    assert lengths("data.template=plain", "rollout.max_response_tokens=60") == ("plain", 4, 60)
    assert lengths("data.max_prompt_tokens=7") == ("chat", 7, 32)
    base = Weights(path=str(model), digest="0", dtype="fp32")
    texts = Provenance(command="sft", role="actor", run="r", step=1, base=base, writing={"texts": {"end": 2}})
    (model / PROVENANCE).write_text(texts.to_json())
    assert lengths() == ("auto", 32, 32)


@pytest.mark.parametrize("argv, names", [
    (["--prompt", "1"], "-c FILE|--model DIR"), (["-c", "x.yaml", "--model", "m", "--prompt", "1"], "give one of"),
    (["--model", "m"], "--model m|--prompt TEXT|--interactive|configuration"),
    (["--model", "nowhere", "--prompt", "1"], "nowhere does not exist"),
])  # fmt: skip
def test_a_model_alone_needs_a_prompt(argv, names, capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: False)
    assert cli.main(["generate", *argv]) == 2
    assert not missing_names(capsys.readouterr().err, *names.split("|"))


def typed(runtime: Runtime, file: str, lines: str) -> tuple[str, str]:
    """What is printed of lines on the first rank's standard input."""
    cfg = ask.with_room(load_config(AskConfig, file, ["actor.parallel.tp=2", "data.max_prompt_tokens=20"]))
    out, said = io.StringIO(), io.StringIO()
    given = mock.patch.object(sys, "stdin", io.StringIO(lines if runtime.is_main else "not read"))
    with given, contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
        run(cfg, runtime, cfg.actor.model.path)
    return out.getvalue(), said.getvalue()


def test_lines_are_answered_until_their_end(file, ranks, tmp_path) -> None:
    """On two ranks. A blank line is passed over; of one that is too long it is said, and the next one is answered."""
    lines = f"1+2=\n\n{'1+' * 40}\n1+2=\n"
    (out, said), second = ranks.run(2, typed, str(file), lines)
    assert len(out.splitlines()) == 2
    assert len(set(out.splitlines())) == 1, "greedy"
    assert not missing_names(said, "prompt longer than 20 tokens", "data.max_prompt_tokens = 20")
    assert second == ("", "")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prompt", "1+2=", "--interactive"], "give one of the two"),
        (["--prompt", " "], "empty prompt"),
        (["--prompt", "1+" * 400], "prompt longer than 507 tokens"),
        (["--prompt", "1", "rollout.num_samples_per_prompt=2"], "equal responses"),
        (["--prompt", "1", "data.max_prompt_tokens=999"], "lower either limit"),
        (["--prompt", "1", "--promt", "2"], ""),
    ],
)
def test_what_cannot_be_asked_is_refused(options, words, file, capsys, ranks) -> None:
    if "--promt" in options:
        with pytest.raises(SystemExit) as ended:
            cli.main(["generate", "-c", str(file), *options])
        assert ended.value.code == 2
        return
    ((status, said),) = ranks.run(1, "command_status", "generate", "-c", str(file), *options)
    assert status == 2
    assert words in said
    assert words != "empty prompt" or "max_prompt_tokens" not in said
    assert "Traceback" not in said


def test_what_is_typed_does_not_reach_ranks_of_a_launcher(file, ranks) -> None:
    for status, said in ranks.run(2, "command_status", "generate", "-c", str(file), "--interactive"):
        assert status == 2
        assert "give --prompt TEXT" in said or not said


def test_a_terminal_is_asked_where_the_file_names_no_data(file, monkeypatch) -> None:
    def asked(*argv: str) -> bool:
        return ask.is_asked(cli.parse(["generate", "-c", str(file), *argv]))

    for terminal in (True, False):
        monkeypatch.setattr("sys.stdin.isatty", lambda answer=terminal: answer)
        assert asked() is terminal
        assert not asked("data.train=x.jsonl")
        assert asked("--interactive")
        assert asked("--prompt", "1", "data.train=x.jsonl")
    assert ask.is_asked(cli.parse(["generate", "-c", "nowhere.yaml", "--interactive"]))
