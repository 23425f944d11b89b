"""A loop of the user's own. Not covered: GPUs, several machines; a kill inside of a write (tests/resume)."""

import json
import os
import signal
from argparse import Namespace

import pytest
import torch

import megarlhf

PROMPTS = ["1+2=", "13+4="]
CHANGING = ("seconds", "memory", "wall_clock", "per_second", "gib")


def rewards_of(samples):
    return torch.tensor([float(len(text)) for text in samples.texts])


def train(config, *, leave_before=None, stop_in=None, prompts=PROMPTS):
    """Run the loop to its end, or fail before a step, or be asked to stop in one. Returns the texts of each step."""
    texts = {}
    with megarlhf.Loop(config) as loop:
        for step in loop.steps():
            if step == leave_before:
                raise KeyError("the machine fails")
            samples = loop.generate(prompts)
            if step == stop_in:
                os.kill(os.getpid(), signal.SIGTERM)
            texts[step] = samples.texts
            loop.state["seen"] = loop.state.get("seen", 0) + len(samples)
            rewards = rewards_of(samples)
            advantages = megarlhf.group_relative(rewards, samples.groups)
            loop.train(samples, advantages, metrics={"reward_mean": float(rewards.mean()), **loop.state})
            loop.update_weights()
        last = loop.generate(prompts, greedy=True)  # such as a final evaluation
        with pytest.raises(ValueError, match="steps of this loop are done"):
            loop.train(last, [1.0] * len(last))
    return texts


def rows(run_dir):
    """Metrics without those of time and memory."""
    metrics = megarlhf.RunResult.of(run_dir).metrics
    return [{k: v for k, v in row.items() if not any(word in k for word in CHANGING)} for row in metrics]


def test_a_loop_that_was_killed_goes_on_with_the_same_numbers(loop):
    """After the last whole step: its metrics, its samples, its own state and its export are those of a loop that was
    not interrupted, bit for bit."""
    steps = loop()["train"] | {"num_steps": 3}
    whole = train(loop("whole", train=steps))
    with pytest.raises(KeyError, match="the machine fails"):
        train(loop("killed", train=steps), leave_before=2)
    left = megarlhf.RunResult.of(loop("killed")["run"]["dir"])
    assert (left.command, left.steps, left.finished, left.can_resume) == ("loop", 2, False, True)
    with torch.serialization.safe_globals([Namespace]):  # as a notebook that reads Megatron's files does
        pass
    assert train(loop("killed", train=steps)) == {2: whole[2]}
    assert rows(loop("killed")["run"]["dir"]) == rows(loop("whole")["run"]["dir"])
    assert [row.get("seen") for row in rows(loop("whole")["run"]["dir"])] == [None, 4, 8, 12]
    exports = [megarlhf.RunResult.of(loop(name)["run"]["dir"]).exports["actor"] for name in ("whole", "killed")]
    first, second = ((export / "model.safetensors").read_bytes() for export in exports)
    assert first == second
    with pytest.raises(ValueError, match=r"raise train\.num_steps above 3"), megarlhf.Loop(loop("killed", train=steps)):
        pass


def test_a_loop_that_is_asked_to_stop_saves_its_step(loop):
    """The step in progress is finished or left out, and the loop goes on with the numbers of one without a stop."""
    whole = train(loop("whole"))
    with pytest.raises(megarlhf.StopRun, match="SIGTERM"):
        train(loop("stopped"), stop_in=1)
    assert megarlhf.RunResult.of(loop("stopped")["run"]["dir"]).can_resume
    assert train(loop("stopped")) in ({1: whole[1]}, {})
    assert rows(loop("stopped")["run"]["dir"]) == rows(loop("whole")["run"]["dir"])


def test_a_loop_computes_what_rl_computes(loop, rl, tmp_path, monkeypatch):
    """GRPO written as a loop: responses, losses, gradient norms and weights of `megarlhf rl`. Both prompts are alike,
    so their order plays no part."""
    (tmp_path / "prompts.jsonl").write_text(
        json.dumps({"prompt": PROMPTS[0]}) + "\n" + json.dumps({"prompt": PROMPTS[0]})
    )
    (tmp_path / "lengths_of_texts.py").write_text(
        "def length(prompt, response, fields):\n    return float(len(response))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    data = {"train": tmp_path / "prompts.jsonl", "max_prompt_tokens": 16}
    theirs = megarlhf.run("rl", rl("lengths_of_texts:length", data=data))
    train(loop(), prompts=[PROMPTS[0]] * 2)
    ours = megarlhf.RunResult.of(loop()["run"]["dir"])
    for name in ("policy_loss", "actor_grad_norm", "entropy", "reward_mean", "rollout_logprob_gap_mean", "tokens"):
        assert ours.column(name) == theirs.column(name), name
    assert ours.column("actor_grad_norm")[1] > 0
    first, second = ((result.exports["actor"] / "model.safetensors").read_bytes() for result in (ours, theirs))
    assert first == second


def test_best_of_n_and_token_advantages(loop):
    """Chosen samples are trained on; one number for a sample is that number at each of its tokens."""
    losses = []
    for name, by_token in (("numbers", False), ("tokens", True)):
        with megarlhf.Loop(loop(name)) as open_loop:
            samples = open_loop.generate(PROMPTS, num_samples=3)
            assert samples.groups.tolist() == [0, 0, 0, 1, 1, 1]
            assert samples.prompts == [PROMPTS[0]] * 3 + [PROMPTS[1]] * 3
            best = samples.select([5, 0])
            assert best.texts == [samples.texts[5], samples.texts[0]]
            assert best.tokens == [samples.tokens[5], samples.tokens[0]]
            ones = [torch.ones(len(tokens)) for tokens in best.tokens] if by_token else [1.0, 1.0]
            losses.append(open_loop.train(best, ones)["policy_loss"])
            open_loop.update_weights()
            exported = open_loop.export()
            assert (exported / "model.safetensors").is_file()
            again = open_loop.generate(best.prompt_tokens, num_samples=1, greedy=True)
            assert len(again) == 2
            assert open_loop.step == 1
            open_loop.save()
    assert losses[0] == losses[1]
    result = megarlhf.RunResult.of(loop("tokens")["run"]["dir"])
    assert (result.finished, result.can_resume, result.steps) == (False, True, 1)


def test_what_does_not_fit_is_refused_and_the_loop_goes_on(loop):
    """Nothing is trained by a refused call."""
    with megarlhf.Loop(loop(data={"max_prompt_tokens": 6})) as open_loop:
        for words, prompts in {"has 0 tokens": [[]], "has 10 tokens": ["123456789"], "token id 99": [[99]]}.items():
            with pytest.raises(ValueError, match=words):
                open_loop.generate(prompts)
        with pytest.raises(ValueError, match="0 prompts"):
            open_loop.generate([])
        samples = open_loop.generate(PROMPTS)
        for words, advantages in {
            "of 3 samples": [1.0] * 3,
            "not finite": [1.0, 1.0, 1.0, float("nan")],
            r"have shape \[99\]": [torch.ones(99)] * 4,
        }.items():
            with pytest.raises(ValueError, match=words):
                open_loop.train(samples, advantages)
        for numbers in ([], [0, 0], [4]):
            with pytest.raises(ValueError, match="from 0 to 3 once"):
                samples.select(numbers)
        with pytest.raises(ValueError, match=r"at most train\.prompts_per_step"):
            open_loop.train(open_loop.generate(PROMPTS, num_samples=3), [1.0] * 6)
        open_loop.train(samples, [1.0, -1.0, 1.0, -1.0])
        with pytest.raises(ValueError, match=r"drawn after 0 steps.*update_weights"):
            open_loop.train(open_loop.generate(PROMPTS), [1.0] * 4)
        with pytest.raises(ValueError, match="has not called"):
            for _ in open_loop.steps():
                pass
        with pytest.raises(ValueError, match=r"while megarlhf\.Loop is at work"), megarlhf.Loop(loop("inner")):
            pass
    with pytest.raises(ValueError, match="not open"):
        open_loop.generate(PROMPTS)


def test_keys_without_effect_are_refused(loop):
    for words, sections in {
        "rewards": {"rewards": [{"kind": "rule", "rule": "exact_match"}]},
        r"data\.train": {"data": {"train": "prompts.jsonl"}},
        r"algo\.advantage = 'gae'": {"algo": {"advantage": "gae"}},
        r"algo\.gamma": {"algo": {"gamma": 0.9}},
        "placement: loss": {"algo": {"kl": {"coef": 0.1}}},
        r"train\.stop": {"train": loop()["train"] | {"stop": {"max_kl": 1.0}}},
        r"checkpoint\.every_updates": {"checkpoint": {"every_updates": 1}},
        r"rollout\.slices": {"rollout": loop()["rollout"] | {"slices": 2}},
    }.items():
        with pytest.raises(ValueError, match=words):
            megarlhf.Loop(loop(**sections))
    with pytest.raises(ValueError, match="torchrun --nproc-per-node 2"):
        megarlhf.Loop(loop(), ["run.nproc=2"]).__enter__()


def on_a_rank(config):
    """What a rank is told where the ranks disagree, and the losses of a loop in which they agree."""
    import os

    rank, told, losses = int(os.environ["RANK"]), [], []
    with megarlhf.Loop(config) as loop:
        for _ in loop.steps():
            for prompts in (PROMPTS[: 1 + rank], ["1+2=", f"{rank}+4="]):
                with pytest.raises(ValueError, match="prompts given to") as error:
                    loop.generate(prompts)
                told.append(str(error.value))
            samples = loop.generate(PROMPTS)
            with pytest.raises(ValueError, match="advantages given to") as error:
                loop.train(samples, rewards_of(samples) + rank)
            told.append(str(error.value))
            rewards = loop.from_first_rank(rewards_of(samples) + rank)
            advantages = megarlhf.group_relative(rewards, samples.groups)
            losses.append(loop.train(samples, advantages)["policy_loss"])
            loop.update_weights()
    return told, losses


def test_ranks_agree_or_are_told_what_differs(loop, on_two_ranks):
    """The same sentence on both ranks, and the loop goes on. Losses are those of one rank."""
    first, second = on_two_ranks(on_a_rank, loop("two"))
    assert first == second
    told, losses = first
    assert "rank 0 has 1 of them and rank 1 has 2" in told[0]
    assert "number 1 is ([1, 4, 14, 8, 15], 2, False) on rank 0 and ([1, 5, 14, 8, 15], 2, False) on rank 1" in told[1]
    assert "from_first_rank" in told[2]
    train(loop("one"))
    assert losses == pytest.approx(megarlhf.RunResult.of(loop("one")["run"]["dir"]).column("policy_loss")[1:], abs=1e-6)


@pytest.mark.slow
def test_vllm_is_closed_and_opened_again(loop):
    """Three engines in one process, the second of which is left by an error."""
    engine = {"rollout": loop()["rollout"] | {"engine": "vllm"}}
    texts = train(loop("first", **engine))
    with pytest.raises(KeyError, match="the machine fails"):
        train(loop("second", **engine), leave_before=1)
    assert train(loop("second", **engine)) == {1: texts[1]}
