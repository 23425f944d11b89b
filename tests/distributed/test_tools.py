"""Runs with tools: real MCP servers and functions, called by a tiny model whose turns are calls.

Not covered: kills by SIGKILL (`make test-faults`), and models that learn (`make demo-tools`).
"""

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from megarlhf.observe.records.metrics import read_metrics
from tests.command import argv_of
from tests.distributed.environment_jobs import failing_command
from tests.distributed.interrupted_jobs import command_until
from tests.distributed.jobs import command_status
from tests.distributed.test_resume import rows, weights
from tests.distributed.test_slices import TRAIN
from tests.rollout.tools.calling_model import write_calling_model

SERVER = Path(__file__).parents[1] / "rollout/tools/mcp_server.py"


def call(name: str, /, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


ADD, LOOK, CUT, ANSWER = call("add", a=1, b=2), call("look_up", name="x"), call("add", a=1)[:40], "It is 3."
TURNS = [ADD, LOOK, ADD + LOOK, CUT, ANSWER, call("act", how="exit"), call("block", seconds=0.5)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_calling_model(tmp_path_factory.mktemp("calling"), TURNS)


def job(model: Path, folder: Path, tools: list[Any], **environment: Any) -> dict[str, Any]:
    """GRPO of 2 steps with 8 conversations of up to 4 turns."""
    prompts = folder / "prompts.jsonl"
    asked = [{"messages": [{"role": "user", "content": f"Add {n}"}], "answer": "3"} for n in range(8)]
    prompts.write_text("".join(json.dumps(record) + "\n" for record in asked))
    return {
        "run": {"dir": str(folder / "run"), "seed": 3},
        "actor": {"model": {"path": str(model)}, "optim": {"lr": 1e-3}},
        "environment": {"tools": tools, "max_turns": 4, "max_turn_tokens": 4, **environment},
        "rewards": [{"kind": "rule", "rule": "numeric_match"}],
        "data": {"train": str(prompts), "max_prompt_tokens": 1100},
        "rollout": {"num_samples_per_prompt": 2, "max_response_tokens": 900, "engine": "vllm"},
        "train": {
            "num_steps": 2,
            "prompts_per_step": 4,
            "mini_batch_samples": 8,
            "max_tokens_per_micro_batch": 2048,
        },
        "algo": {"advantage": "group_relative"},
    }


def mcp(notes: Path, way: str = "good", names: tuple[str, ...] = ("add", "act", "block")) -> dict[str, Any]:
    return {"mcp": f"env NOTES='{notes}' '{sys.executable}' '{SERVER}' {way}", "names": names}


def turns_of(run: Path) -> list[dict[str, Any]]:
    """Turns of all samples, each with the messages that follow it."""
    turns = []
    for file in sorted((run / "samples").glob("step_*.jsonl")):
        for line in file.read_text().splitlines():
            spoken = json.loads(line)["turns"]
            turns += [{**turn, "results": after["observed"]} for turn, after in itertools.pairwise(spoken)]
    return turns


def test_a_run_survives_a_server_that_ends_and_one_that_is_slow(model, vllm_ranks, tmp_path) -> None:
    """Results stand behind their calls, in their order, and the trainer reads what the engine has read."""
    cfg = job(model, tmp_path, ["tests.rollout.tools.functions:look_up", mcp(tmp_path / "notes")])
    cfg["environment"]["seconds_per_step"] = 0.3
    vllm_ranks.run(1, "command", *argv_of("rl", cfg, tmp_path / "cfg.yaml"))
    last = read_metrics(tmp_path / "run")[-1]
    assert last["step"] == 2
    assert last["rollout_logprob_gap_max"] < 1e-4
    seen: dict[str, set[Any]] = {}
    for turn in turns_of(tmp_path / "run"):
        seen.setdefault(turn["text"], set()).add(tuple(message["content"] for message in turn["results"]))
    looked = '{"name": "x", "kind": "short", "limit": null}'
    ended = "error: the tool's server ended during the call"
    assert seen[ADD] <= {("3",), (ended,)}  # another conversation may have ended the server meanwhile
    assert seen[LOOK] == {(looked,)}
    assert seen[ADD + LOOK] <= {("3", looked), (ended, looked)}
    assert all(text.startswith("error: this call cannot be read: not JSON") for (text,) in seen[CUT])
    assert seen[TURNS[5]] == {(ended,)}
    assert seen[TURNS[6]] <= {("error: took longer than 0.3 s",), (ended,)}
    assert (tmp_path / "notes").read_text().count("start") > 2
    assert ANSWER not in seen, "an answer ends its conversation"


@pytest.mark.parametrize("outcome, calls, owner, method", [
    ("killed", 2, TRAIN, "step"), ("ended", 12, "megarlhf.rollout.bank:StepBank", "add_turn"),
])  # fmt: skip
def test_a_killed_run_goes_on_bit_for_bit(outcome, calls, owner, method, model, ranks, vllm_ranks, tmp_path) -> None:
    """Killed while it trains, or losing its engine in the middle of a rollout, after which it begins the conversations
    in flight again: their calls are made again, and the results compared."""
    pool, runs = ranks if outcome == "killed" else vllm_ranks, []
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
        cfg = job(
            model, tmp_path / name, ["tests.rollout.tools.functions:look_up", "tests.rollout.tools.functions:add"]
        )
        cfg["rollout"]["engine"] = "megatron" if outcome == "killed" else "vllm"
        cfg["checkpoint"] = {"every_updates": 1, "every_minutes": 0, "background": False}
        runs.append((tmp_path / name / "run", argv_of("rl", cfg, tmp_path / f"{name}.yaml")))
    (whole, argv), (cut, argv_cut) = runs
    pool.run(1, "command", *argv)
    ended, written = pool.run(1, command_until, calls, owner, method, *argv_cut)[0]
    assert (ended, "The rollout engine is rebuilt" in written) == (outcome, outcome == "ended"), written
    if outcome == "killed":
        pool.run(1, "command", *argv_cut)
    assert rows(cut) == rows(whole)
    assert weights(cut) == weights(whole)
    assert any("error: there is no tool 'act'" in json.dumps(turn["results"]) for turn in turns_of(whole))


def test_a_prompt_at_a_terminal(model, ranks, tmp_path) -> None:
    """Turns, and under them the results of tools with their role."""
    cfg = job(model, tmp_path, ["tests.rollout.tools.functions:look_up", "tests.rollout.tools.functions:add"])
    cfg = {key: cfg[key] for key in ("run", "actor", "environment", "data", "rollout")}
    cfg["actor"].pop("optim")
    cfg["rollout"] |= {"engine": "megatron", "num_samples_per_prompt": 8}
    status, written = ranks.run(
        1, command_status, *argv_of("generate", cfg, tmp_path / "cfg.yaml"), "--prompt", "Add 1", "greedy=false"
    )[0]
    assert status == 0, written
    assert f"{ADD}\n    tool: 3\n" in written
    assert '    tool: {"name": "x", "kind": "short", "limit": null}\n' in written
    assert "(ended by model; rewards " in written


@pytest.mark.parametrize("changes, words", [
    ({"environment": {"tools": [mcp(Path("/dev/null"), "wrong_schema", ())]}}, "environment.tools[0]: the MCP server"),
    ({"environment": {"parser": "vllm:hermse"}}, "environment.parser = vllm:hermse: vLLM has no parser"),
    ({"environment": {"parser": "hermse"}}, "environment.parser = 'hermse', expected auto, hermes,"),
    ({"data": {"template": "plain"}}, "environment.tools needs a chat template"),
    ({"data": {"chat_template": "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"}}, "tools"),
])  # fmt: skip
def test_what_is_wrong_with_the_tools_is_said_before_the_start(changes, words, model, vllm_ranks, tmp_path) -> None:
    cfg = job(model, tmp_path, ["tests.rollout.tools.functions:look_up"])
    if changes.get("data", {}).get("template") == "plain":
        Path(cfg["data"]["train"]).write_text('{"prompt": "Add 1", "answer": "3"}\n')
    for section, keys in changes.items():
        cfg[section] |= keys
    status, written = vllm_ranks.run(1, failing_command, *argv_of("rl", cfg, tmp_path / "cfg.yaml"), "--dry-run")[0]
    assert status != 0
    assert words in " ".join(written.split())
    assert not (tmp_path / "run").exists()


def test_thoughts_that_the_template_opens_are_those_of_each_turn(model, ranks, tmp_path) -> None:
    """The template asks with `<think>` where the record says so, and never behind a result: calls count in the second
    half of the records, and behind a result."""
    opens = "{%- if thinks and messages[-1].role == 'user' %}<think>\n{% endif -%}"
    template = (Path(__file__).parents[2] / "configs/demo-tools/chat_template.jinja").read_text()
    assert template.count("<|im_start|>assistant\n{% endif -%}") == 1
    cfg = job(model, tmp_path, ["tests.rollout.tools.functions:look_up", "tests.rollout.tools.functions:add"])
    head, _, tail = template.rpartition("{% endif -%}")
    cfg["data"]["chat_template"] = f"{head}{opens}{{% endif -%}}{tail}"
    cfg["environment"]["history"] = "as_sampled"
    cfg["rollout"]["engine"] = "megatron"
    cfg["train"] |= {"num_steps": 1, "prompts_per_step": 8, "mini_batch_samples": 16}
    prompts = Path(cfg["data"]["train"])
    records = [json.loads(line) for line in prompts.read_text().splitlines()]
    for number, record in enumerate(records):
        record["chat_template_kwargs"] = {"thinks": number % 2 == 0}
    prompts.write_text("".join(json.dumps(record) + "\n" for record in records))
    cfg["samples"] = {"count": 16}
    ranks.run(1, "command", *argv_of("rl", cfg, tmp_path / "cfg.yaml"))
    rows = [json.loads(line) for line in (tmp_path / "run/samples/step_000001.jsonl").read_text().splitlines()]
    thinking = [row for row in rows if row["prompt"].endswith("<think>\n")]
    assert 0 < len(thinking) < len(rows)
    assert all(len(row["turns"]) == 1 for row in thinking)
    assert any(len(row["turns"]) > 2 for row in rows if row not in thinking)
