"""Stop strings, further end tokens, filters and best of n through `generate` at TP2, the same in both engines.

Not covered: the filters by hand (tests/algo/test_sampling.py), the choice among responses (tests/trainers).
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarlhf.observe.records.metrics import read_metrics
from tests.command import argv_of
from tests.distributed.test_rl_layouts import config as rl_config
from tests.refuses import missing_names

ENGINES = ("vllm", "megatron")
Lines = list[dict[str, Any]]


@pytest.fixture
def generated(vllm_ranks, one_layer, data, tmp_path) -> Any:
    """`megarlhf generate` at TP2 with overrides: its lines and its row of metrics."""
    tree = {
        "run": {"dir": "set below", "seed": 3},
        "actor": {"model": {"path": str(one_layer["plain"])}, "parallel": {"tp": 2}},
        "data": {"train": str(data["prompts"]), "max_prompt_tokens": 16},
        "rollout": {"max_response_tokens": 10},
        "max_samples": 12,
    }
    (tmp_path / "cfg.yaml").write_text(yaml.safe_dump(tree))

    def run(name: str, *overrides: str) -> tuple[Lines, dict[str, Any]]:
        folder = tmp_path / name
        vllm_ranks.run(2, "command", "generate", "-c", str(tmp_path / "cfg.yaml"), f"run.dir={folder}", *overrides)
        lines = [json.loads(line) for line in (folder / "responses.jsonl").read_text().splitlines()]
        return lines, read_metrics(folder)[-1]

    return run


def responses(lines: Lines) -> list[str]:
    return [line["response"] for line in lines]


def test_a_text_ends_a_response_and_so_does_a_token_that_is_named(generated) -> None:
    """A pair of letters that stands in the middle of an unstopped response; and the token of another letter."""
    plain, _ = generated("plain", "rollout.engine=megatron")
    texts = responses(plain)
    longest = max(texts, key=len)
    stop = longest[2:4]
    expected = [text[: text.index(stop) + len(stop)] if stop in text else text for text in texts]
    assert expected != texts
    by_engine = [
        generated(f"stop_{engine}", f"rollout.engine={engine}", f"rollout.stop=['{stop}']")[0] for engine in ENGINES
    ]
    for lines in by_engine:
        assert responses(lines) == expected
        assert [line["finished"] for line in lines] == [
            line["finished"] or stop in text for line, text in zip(plain, texts, strict=True)
        ]


def test_filters_that_leave_one_token_give_the_greedy_response(generated) -> None:
    greedy = responses(generated("greedy", "rollout.engine=megatron")[0])
    drawn = responses(generated("drawn", "greedy=false")[0])
    assert drawn != greedy
    for engine in ENGINES:
        for name, option in (("k", "rollout.top_k=1"), ("p", "rollout.top_p=1e-6"), ("m", "rollout.min_p=1.0")):
            lines, _ = generated(f"{engine}_{name}", f"rollout.engine={engine}", "greedy=false", option)
            assert responses(lines) == greedy, (engine, option)


def test_the_best_of_eight_is_what_sft_reads(generated, vllm_ranks, one_layer, tmp_path) -> None:
    eight = ["greedy=false", "rollout.num_samples_per_prompt=8", "rollout.engine=megatron"]
    reward = ["rewards=[{kind: rule, rule: 'tests.distributed.user_rewards:length', name: length, workers: 0}]"]
    every, _ = generated("every", *eight, *reward)
    best, counted = generated("best", *eight, *reward, "select=best", "min_reward=2")
    pairs, counted_pairs = generated("pairs", *eight, *reward, "select=best_and_worst", "pairs_per_prompt=2")
    groups = [every[n : n + 8] for n in range(0, len(every), 8)]
    done = [[line for line in group if line["finished"] and line["response"].strip()] for group in groups]
    lengths = [[len(line["response"]) for line in group] for group in done]
    assert [line["reward"] for line in best] == [max(group) for group in lengths if group and max(group) >= 2]
    both = [list(zip(sorted(g, reverse=True), sorted(g), strict=True))[:2] for g in lengths]
    assert [line["rewards"] for line in pairs] == [[more, less] for g in both for more, less in g if more > less]
    assert counted_pairs["pairs_selected"] == len(pairs) > counted_pairs["prompts_selected"]
    assert counted["prompts_selected"] == len(best) > 0
    assert counted["responses_cut"] > 0, "a cut response has no end to learn"
    sft = {
        "run": {"dir": str(tmp_path / "sft")},
        "actor": {"model": {"path": str(one_layer["plain"])}, "parallel": {"tp": 2}},
        "data": {"train": str(tmp_path / "best/responses.jsonl"), "max_prompt_tokens": 16, "max_response_tokens": 16},
        "train": {"num_steps": 1, "mini_batch_samples": 2, "max_tokens_per_micro_batch": 64},
    }
    vllm_ranks.run(2, "command", *argv_of("sft", sft, tmp_path / "sft.yaml"))
    assert read_metrics(tmp_path / "sft")[-1]["loss"] > 0


def test_responses_outlast_a_reward_that_fails(generated, vllm_ranks, tmp_path, one_layer) -> None:
    """They are kept without rewards, and the command says so. What can be seen earlier is: nothing is drawn then."""
    plain, _ = generated("plain", "rollout.engine=megatron")
    argv = ["generate", "-c", str(tmp_path / "cfg.yaml"), "rollout.engine=megatron"]
    rule = "tests.distributed.bad_rewards:{name}"

    def refused(name: str, rule_name: str, *options: str) -> tuple[str, Path]:
        folder = tmp_path / name
        reward = f"rewards=[{{kind: rule, rule: '{rule.format(name=rule_name)}'{''.join(options)}}}]"
        status, said = vllm_ranks.run(2, "command_status", *argv, f"run.dir={folder}", reward)[0]
        assert status == 2, said
        return said, folder

    said, folder = refused("broken", "always_raises", ", check: none")
    assert not missing_names(said, "always_raises", "sample 0", f"{folder}/responses_without_rewards.jsonl")
    kept = [json.loads(line) for line in (folder / "responses_without_rewards.jsonl").read_text().splitlines()]
    assert responses(kept) == responses(plain)
    assert all(line["rewards"] == {} for line in kept)
    assert not (folder / "responses.jsonl").exists()
    said, folder = refused("generator", "yields")
    assert not missing_names(said, "yields", "generator")
    assert not list(folder.glob("responses*")), "before anything is drawn"


def test_rl_trains_on_responses_that_a_text_ends(vllm_ranks, one_layer, data, tmp_path) -> None:
    """At TP2 with vLLM: more responses are finished, and trainer and engine agree on every token."""
    cfg = rl_config({**one_layer, "other": one_layer["scorer"]}, data["prompts"], {"tp": 2}, advantage="grpo")
    del cfg["critic"]
    cfg["train"] |= {"num_steps": 2, "epochs_per_step": 1}
    cfg["rollout"] |= {"engine": "vllm", "parallel": {"tp": 2}}
    argv = argv_of("rl", cfg, tmp_path / "cfg.yaml")
    vllm_ranks.run(2, "command", *argv, f"run.dir={tmp_path / 'plain'}")
    vllm_ranks.run(2, "command", *argv, f"run.dir={tmp_path / 'stop'}", "rollout.stop=['e', 'a', '1', '2']")
    plain, stopped = (read_metrics(tmp_path / name)[1:] for name in ("plain", "stop"))
    assert stopped[0]["finished_fraction"] > plain[0]["finished_fraction"]
    assert stopped[0]["response_length_mean"] < plain[0]["response_length_mean"]
    for row in stopped:
        assert row["rollout_logprob_gap_max"] < 1e-4
