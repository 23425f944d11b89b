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
from megarlhf.runtime import Runtime
from megarlhf.trainers.generation.chat import run
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
