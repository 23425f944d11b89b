"""User code named by import path, in runs of two ranks: the same bits as by name, and wrong code ends the first step.

Not covered: GPUs; samplers under pipeline stages of different nodes.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from megarlhf.algo.policy import Bounds
from megarlhf.columns import Ragged
from megarlhf.config import AlgoConfig
from megarlhf.config.observe import ObserveConfig
from megarlhf.data.sample_types import PromptSample
from megarlhf.experience import Experience
from megarlhf.observe.records.metrics import read_metrics
from megarlhf.own_code.policy_terms import surrogate_of, try_terms
from megarlhf.rollouts import Rollouts, VersionRuns
from megarlhf.runtime import Runtime
from megarlhf.trainers.rl.advantages import add_advantages
from megarlhf.trainers.rl.own_sampler import OwnSampler
from megarlhf.trainers.run.observers import Observers
from tests.command import argv_of
from tests.distributed.interrupted_jobs import command_until
from tests.distributed.jobs import command_status
from tests.distributed.test_rl_layouts import config
from tests.refuses import refuses

HERE = "tests.distributed.own_functions:"
TIMES = ("seconds", "tokens_per_second", "wall_clock", "idle", "memory", "energy", "gib", "cpu", "per_second")


def reproducible(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: x for name, x in row.items() if not any(word in name for word in TIMES)} for row in rows]


BY_NAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ppo": (
        {"advantage": "gae", "policy_loss": "cispo", "clip_low": 0.2, "clip_high": 0.2, "ratio": "geometric",
         "whiten_advantages": True, "kl": {"coef": 0.1}},
        {"advantage": "gae", "policy_loss": "cispo", "ratio": "geometric", "token_weights": "ones", "kl": {}},
    ),
    "grpo": (
        {"advantage": "group_relative", "kl": {"coef": 0.05, "placement": "loss", "estimator": "k3"}},
        {"advantage": "group_relative", "policy_loss": "clip", "ratio": "token",
         "kl": {"coef": 0.05, "placement": "loss", "estimator": "k3"}},
    ),
}  # fmt: skip


def paths(algo: dict[str, Any]) -> dict[str, Any]:
    """The same with import paths in place of names."""
    named = copy.deepcopy(algo)
    for section, keys in (
        (named, ("advantage", "policy_loss", "ratio", "token_weights")),
        (named["kl"], ("estimator",)),
    ):
        section |= {key: HERE + section[key] for key in keys if key in section}
    return named


@pytest.mark.parametrize("kind", BY_NAME)
def test_built_in_parts_by_import_path_give_the_same_bits(kind, ranks, one_layer, data, tmp_path) -> None:
    """Metrics of two steps. A KL estimator in the reward is left out: the kernel, which adds that of a name, rounds
    once less."""
    by_name, by_path = BY_NAME[kind]
    models = {**one_layer, "other": one_layer["scorer"]}
    rows = {}
    for way, algo in (
        ("name", by_name),
        ("path", {**by_name, **paths(by_path), "kl": by_name["kl"] | paths(by_path)["kl"]}),
    ):
        cfg: dict[str, Any] = config(models, data["prompts"], {"tp": 2}, **algo)
        cfg["train"]["num_steps"] = 2
        argv = argv_of("rl", cfg, tmp_path / f"{way}.yaml")
        ranks.run(2, "command", *argv, f"run.dir={tmp_path / way}")
        rows[way] = reproducible(read_metrics(tmp_path / way))
    assert rows["path"] == rows["name"]
    assert len(rows["name"]) == 3


def sampled(lengths: tuple[int, ...] = (2, 3, 1, 4)) -> Experience:
    lengths_N = torch.tensor(lengths)
    total = int(lengths_N.sum())
    generator = torch.Generator().manual_seed(0)
    logprobs = Ragged(-torch.rand(total, generator=generator), lengths_N)
    rollouts = Rollouts(
        responses=Ragged(torch.arange(total), lengths_N),
        logprobs=logprobs,
        finished_N=torch.ones(len(lengths), dtype=torch.bool),
        versions=VersionRuns.constant(0, lengths_N),
    )
    experience = Experience(tuple(torch.tensor([1, 4]) for _ in lengths), torch.tensor([0, 0, 1, 1]), rollouts)
    return experience.with_per_sample({"rewards": torch.tensor([1.0, 0.0, 3.0, 2.0])})


def advantages_or_errors(runtime: Runtime, names: tuple[str, ...]) -> dict[str, str]:
    """The message of each wrong advantage on this rank, or its numbers."""
    results = {}
    for name in names:
        step = sampled()
        before = copy.deepcopy(step)
        chance = torch.get_rng_state().clone()
        try:
            algo = AlgoConfig.model_validate({"advantage": HERE + name})
            column = add_advantages(step, algo, first=True).columns["advantages"]
            results[name] = str(column.values_T.tolist())
        except ValueError as error:
            results[name] = str(error)
        assert torch.equal(step.per_sample["rewards"], before.per_sample["rewards"])
        assert torch.equal(step.rollouts.logprobs.values_T, before.rollouts.logprobs.values_T)
        assert torch.equal(torch.get_rng_state(), chance)
    return results


WRONG = {
    "rank_dependent": ("differs between ranks 0 and ranks 1",),
    "time_dependent": ("when it was called again",),
    "by_chance": ("when it was called again",),
    "by_torch_s_chance": ("when it was called again",),
    "not_a_number": ("4 of 4 numbers that are not finite",),
    "wrong_shape": ("shape (3,)", "one for each of 4 responses or of their 10 tokens"),
    "no_tensor": ("[1.0, 0.0, 3.0, 2.0]", "expected a tensor"),
    "raises": ("KeyError: 'nothing'", "own_functions.py", 'step.rewards_N + {}["nothing"]'),
    "raises_on_one_rank": ("rank 1: ", "KeyError: 'only here'"),
    "undeclared": ("'values' is not there", "reads=('values',)"),
    "two_columns": ("the columns advantages, other", "writes = ('advantages',)"),
    "two_parameters": ("(step, other)", "is called with (step)"),
    "asynchronous": ("async",),
    "missing": ("has no function 'missing'", "own_functions.py"),
}


def test_a_wrong_advantage_is_one_message_on_every_rank(ranks) -> None:
    """It names the function and what it did; nothing that the run has is changed."""
    names = (*WRONG, "writes_to_what_it_gets")
    first, second = ranks.run(2, advantages_or_errors, names)
    assert first == second
    for name, words in WRONG.items():
        assert f"advantage {(HERE + name)!r}" in first[name], name
        assert all(word in first[name] for word in words), (name, first[name])
    assert first["writes_to_what_it_gets"] == "[1.0, 1.0, 0.0, 0.0, 0.0, 3.0, 2.0, 2.0, 2.0, 2.0]"


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("policy_loss", "detached", ("no gradient flows",)),
        ("policy_loss", "mean_only", ("shape ()", "shape (11,)")),
        ("policy_loss", "k3", ("parameters", "bounds")),
        ("policy_loss", "swapped", ("(log_ratio_T, logprobs_T, advantages_T, bounds)", "in this order")),
        ("token_weights", "share_of_all", ("must not average over them",)),
        ("estimator", "log_of_negative", ("returned nan for a token whose inputs are finite",)),
        ("ratio", "three_parameters", ("(log_ratio_T, responses, more)",)),
        ("token_weights", "raises", ("(step)",)),
        ("ratio", "missing", ("has no function 'missing'",)),
    ],
)
def test_a_wrong_part_of_the_loss_is_refused_before_the_run(kind, name, words) -> None:
    with refuses(HERE + name, *words):
        try_terms([(kind, HERE + name)])


def test_a_part_of_the_loss_gives_the_same_digest_each_time(monkeypatch) -> None:
    """Ranks compare this digest; a function that depends on the rank gives another."""
    one = try_terms([("ratio", HERE + "of_rank"), ("policy_loss", HERE + "clip")])
    assert one == try_terms([("ratio", HERE + "of_rank"), ("policy_loss", HERE + "clip")])
    monkeypatch.setenv("RANK_OF_TEST", "1")
    other = try_terms([("ratio", HERE + "of_rank"), ("policy_loss", HERE + "clip")])
    assert [name for name in one if one[name] != other[name]] == [f"ratio {HERE + 'of_rank'!r}"]


@pytest.mark.parametrize(
    ("name", "words"), [("nan_for_many", ("returned", "inputs are finite")), ("flows_for_few", ("no gradient flows",))]
)
def test_what_goes_wrong_with_real_tokens_only_is_named(name, words) -> None:
    """The made-up tokens are few. A number that was wrong before the function is not laid at its door."""
    try_terms([("policy_loss", HERE + name)])
    surrogate, tokens_T = surrogate_of(HERE + name), torch.linspace(0.1, 0.9, 20)
    with refuses(HERE + name, *words):
        surrogate(tokens_T.clone().requires_grad_(), tokens_T.clone().requires_grad_(), tokens_T, Bounds())
    few_T = torch.full((3,), torch.nan).requires_grad_()
    assert surrogate(few_T, few_T, tokens_T[:3], Bounds()).loss_T.isnan().all()


def choices_or_errors(runtime: Runtime, names: tuple[str, ...]) -> dict[str, str]:
    prompts = [PromptSample(tokens=[n], text=str(n), fields={}, index=n) for n in range(6)]
    results = {}
    for name in names:
        try:
            sampler = OwnSampler(HERE + name, prompts, 2, seed=0)
            results[name] = str([sampler.take(step) for step in range(3)])
        except ValueError as error:
            results[name] = str(error)
    return results


WRONG_SAMPLERS = {
    "of_this_rank": ("number 0 is 0 on rank 0 and 1 on rank 1", "it must not depend on the rank"),
    "random_ones": ("asked again for step 1",),
    "twice_the_same": ("[0, 0]", "2 different numbers", "from 0 to 5"),
    "beyond": ("[6, 7]", "from 0 to 5"),
    "Stateless": ("no method state_dict()", "load_state_dict"),
    "Forgets": ("a new one with its state", "state_dict does not save"),
    "ForgetsItsPosition": ("asked again for step 2", "a new one with its state"),
    "NotJson": ("the state of", "{'seen': {1, 2}}", "JSON"),
    "gae": ("object of Advantage", "name the class or a function"),
    "raises": ("(step)", "prompts, step, count, seed"),
}


def test_a_wrong_sampler_is_one_message_on_every_rank(ranks) -> None:
    first, second = ranks.run(2, choices_or_errors, (*WRONG_SAMPLERS, "first_ones"))
    assert first == second
    for name, words in WRONG_SAMPLERS.items():
        assert all(word in first[name] for word in (f"sampler {(HERE + name)!r}", *words)), (name, first[name])
    assert first["first_ones"] == "[[0, 1], [2, 3], [4, 5]]"


@pytest.fixture
def watched(one_layer, data, tmp_path) -> list[str]:
    """GRPO of two steps with a sampler, a metric and an observer of the user's own."""
    models = {**one_layer, "other": one_layer["scorer"]}
    cfg: dict[str, Any] = config(models, data["prompts"], {}, advantage="group_relative", kl={"coef": 0.0})
    cfg["rewards"] = [{"kind": "rule", "rule": "exact_match"}]
    cfg["train"] |= {"num_steps": 2, "epochs_per_step": 1, "sampler": HERE + "first_ones"}
    cfg["observe"] = {"metrics": [HERE + "length_of_longest"], "observers": [HERE + "Counter"]}
    cfg["checkpoint"] = {"every": 1}
    return argv_of("rl", cfg, tmp_path / "cfg.yaml")


def test_observers_change_nothing_and_keep_their_state(watched, ranks, tmp_path) -> None:
    """The observer writes to all that it gets and seeds the generators. A killed run counts on where it was, and a run
    without observers has the same numbers."""
    whole, parts, bare = tmp_path / "whole", tmp_path / "parts", tmp_path / "bare"
    written = ranks.run(2, "command", *watched, f"run.dir={whole}")[0]
    assert f"own code: observe.observers = {HERE}Counter" in written.replace("\n", "")
    rows = reproducible(read_metrics(whole))
    assert [row.get("steps_seen") for row in rows[1:]] == [1, 2]
    assert all(row["length_of_longest"] in range(1, 7) for row in rows[1:])

    at = ("megarlhf.resume.points.checkpointer:Checkpointer", "boundary_reached")
    killed = ranks.run(2, command_until, 6, *at, *watched, f"run.dir={parts}")
    assert [outcome for outcome, _ in killed] == ["killed"] * 2
    ranks.run(2, "command", *watched, f"run.dir={parts}")
    assert reproducible(read_metrics(parts)) == rows

    ranks.run(2, "command", *watched, f"run.dir={bare}", "observe.metrics=[]", "observe.observers=[]")
    own = ("steps_seen", "length_of_longest")
    without = [{name: value for name, value in row.items() if name not in own} for row in rows]
    assert reproducible(read_metrics(bare)) == without


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("taken_name", "'reward_mean', which is there already"),
        ("huge", "a number that fp64 holds"),
        ("forgets_to_return", "returned None"),
    ],
)
def test_a_wrong_metric_is_refused(name, words) -> None:
    metrics = ObserveConfig(metrics=(HERE + name,))
    with refuses(HERE + name, words):
        Observers(metrics, "rl", is_main=True).observed(1, {"reward_mean": 0.0}, None)


def test_a_wrong_metric_ends_the_first_step_and_a_later_failure_is_a_warning(watched, ranks, tmp_path) -> None:
    """A name that only the log knows is refused too. A state that goes wrong later keeps its last good one."""
    short = ["train.num_steps=3", "checkpoint.every=1"]
    results = ranks.run(
        2, command_status, *watched, *short, f"run.dir={tmp_path / 'a'}", f"observe.metrics=['{HERE}wall_clock']"
    )
    assert [status for status, _ in results] == [2, 2]
    assert "names of ours: wall_clock" in results[0][1].replace("\n", " ")
    own = f"observe.observers=['{HERE}fails_later', '{HERE}BadLater']"
    written = ranks.run(2, "command", *watched, *short, f"run.dir={tmp_path / 'b'}", own)[0].replace("\n", " ")
    assert "the disk of the plots is full" in written
    assert "last good state" in written
    assert len(read_metrics(tmp_path / "b")) == 4


def test_own_code_that_cannot_be_loaded_is_refused_before_ranks_start(watched, tmp_path) -> None:
    """On the first rank alone, as the command line checks it; a directory for the run is not made."""
    for override, words in {
        "train.sampler=nowhere:f": ("sampler 'nowhere:f'", "cannot import nowhere", "PYTHONPATH"),
        f"algo.advantage={HERE}two_parameters": ("advantage", "is called with (step)"),
        "algo.advantage=grop": ("did you mean 'grpo'", "package.module:name"),
        "algo.ratio=sequenze": ("did you mean 'sequence'", "package.module:name"),
        f"observe.metrics=['{HERE}Stateless']": ("is a class", "observe.observers"),
        f"observe.metrics=['{HERE}Counter']": ("named more than once",),
        "observe.metrics=[lengths]": ("'lengths' is no import path", "mine:function"),
    }.items():
        message = refused_message([*watched, "--dry-run", override, f"run.dir={tmp_path / 'never'}"])
        assert all(word in message for word in words), (override, message)
    assert not (tmp_path / "never").exists()


def refused_message(argv: list[str]) -> str:
    import contextlib
    import io

    from megarlhf.commands.cli import main

    written = io.StringIO()
    with contextlib.redirect_stdout(written), contextlib.redirect_stderr(written):
        assert main(argv) == 2, written.getvalue()
    return written.getvalue()


CHANGED = "import megarlhf\n\n\n@megarlhf.advantage\ndef mine(step):\n    return step.rewards_N{}\n"


def command_with_module(runtime: Runtime, folder: str, *argv: str) -> tuple[int, str]:
    """A command whose user code is in `folder`, imported anew."""
    import sys

    sys.path.insert(0, folder)
    sys.modules.pop("changing_code", None)
    try:
        return command_status(runtime, *argv)
    finally:
        sys.path.remove(folder)
        sys.modules.pop("changing_code", None)


def test_a_changed_function_is_noted_on_resume(watched, ranks, tmp_path) -> None:
    folder: Path = tmp_path / "code"
    folder.mkdir()
    plain = [*watched, f"run.dir={tmp_path / 'run'}", "algo.advantage=changing_code:mine", "train.sampler="]
    for number, text in enumerate((CHANGED.format(""), CHANGED.format(" * 2"))):
        (folder / "changing_code.py").write_text(text)
        results = ranks.run(2, command_with_module, str(folder), *plain, f"train.num_steps={number + 1}")
        assert [status for status, _ in results] == [0, 0], results
    assert "advantage changing_code:mine has another source" in results[0][1].replace("\n", " ")
