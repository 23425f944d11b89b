"""What a user gets wrong is told in a sentence, with exit status 2, before anything is rehearsed or written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarlhf.commands.rehearse import main
from megarlhf.rehearsal import rehearse
from tests.refuses import missing_names
from tests.rehearsal.jobs import DENSE, EXPERTS, H100, job_tree, write_job, write_model

Change = Callable[[Path], list[str]]


@pytest.fixture(autouse=True)
def nothing_is_rehearsed(monkeypatch) -> None:
    """A mistake must be found before."""

    def run_ranks(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a rank is rehearsed")

    monkeypatch.setattr("megarlhf.rehearsal.rehearse.run_ranks", run_ranks)


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The message of a command that is refused."""
    try:
        status = main(argv)
    except SystemExit as end:  # by argparse
        status = end.code  # type: ignore[assignment]
    assert status == 2
    return capsys.readouterr().err


def sft(folder: Path, **changes: Any) -> str:
    """A file for two stages, with `changes` of its sections."""
    tree = job_tree("sft", folder, pp=2)
    tree["run"]["world_size"] = 4
    for section, values in changes.items():
        tree[section] |= values
    return str(write_job("sft", folder, tree))


def hardware_with(folder: Path, **keys: Any) -> str:
    file = folder / "hardware.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(H100.read_text()) | keys))
    return str(file)


def written(folder: Path, text: str) -> str:
    (folder / "lengths").write_text(text)
    return str(folder / "lengths")


CPU = {"kind": "cpu"}
OPTIONS: dict[str, tuple[Callable[[Path], tuple[str, ...]], tuple[str, ...]]] = {
    "an unknown key in a hardware file": (
        lambda folder: ("--hardware", hardware_with(folder, memory_bandwith={"value": 1, "source": "assumed"})),
        ("memory_bandwith", "memory_bandwidth"),
    ),
    "no hardware file": (lambda folder: ("--hardware", str(folder / "none.yaml")), ("none.yaml",)),
    "an unknown key in a margin file": (lambda folder: ("--margin", sft(folder)), ("unknown key", "run")),
    "a margin for a CPU": (
        lambda folder: ("--margin", sft(folder), "--hardware", hardware_with(folder, **CPU)),
        ("--margin", "GPU", "CPU"),
    ),
    "TransformerEngine on a CPU": (
        lambda folder: ("--layers", "te", "--hardware", hardware_with(folder, **CPU)),
        ("--layers te", "GPU", "CPU"),
    ),
    "a world that does not divide": (lambda folder: ("--world-size", "5"), ("5", "tp x cp x pp", "1 x 1 x 2")),
    "ranks beyond the world": (lambda folder: ("--ranks", "0,4"), ("--ranks 4", "0 to 3")),
    "ranks that are no numbers": (lambda folder: ("--ranks", "0,first"), ("0,first", "all")),
    "uneven nodes": (lambda folder: ("--ranks-per-node", "3"), ("--ranks-per-node 3", "4 ranks", "divides 4")),
    "more steps than there are": (lambda folder: ("--steps", "5"), ("--steps 5", "4", "train.num_steps")),
    "the world twice": (
        lambda folder: ("--world-size", "4", "run.world_size=8"),
        ("--world-size 4", "run.world_size=8", "leave one of them out"),
    ),
    "a mean that is no number": (
        lambda folder: ("--response-lengths", "lognormal:mean=inf,sigma=1"),
        ("--response-lengths", "lognormal:mean=inf,sigma=1", "constant:N"),
    ),
    "a deviation that is no number": (
        lambda folder: ("--response-lengths", "lognormal:mean=9,sigma=inf"),
        ("--response-lengths", "lognormal:mean=9,sigma=inf", "constant:N"),
    ),
    "layers of a CPU": (
        lambda folder: ("--hardware", hardware_with(folder, **CPU), "--layers", "local"),
        ("--layers local", "GPU", "CPU"),
    ),
    "lengths in other words": (
        lambda folder: ("--response-lengths", "about:7"),
        ("--response-lengths", "about:7", "constant:N"),
    ),
    "lengths without a number": (
        lambda folder: ("--prompt-lengths", "constant:many"),
        ("--prompt-lengths", "constant:many", "constant:N"),
    ),
    "an earlier run without lengths": (
        lambda folder: ("--response-lengths", str(folder)),
        ("--response-lengths", "lengths.jsonl"),
    ),
    "a deviation with which nearly all are 1": (
        lambda folder: ("--response-lengths", "lognormal:mean=900,sigma=20"),
        ("--response-lengths", "lognormal:mean=900,sigma=20", "constant:N"),
    ),
    "a length that is not whole": (
        lambda folder: ("--response-lengths", written(folder, "7\n1.5\n")),
        ("--response-lengths", "line 2", "1.5"),
    ),
    "a length that is a word": (
        lambda folder: ("--response-lengths", written(folder, '{"responses": "12"}')),
        ("line 1", "whole number"),
    ),
    "no turn": (lambda folder: ("--turns", "constant:0"), ("--turns", "constant:0", "1 or more")),
    "less than nothing observed": (
        lambda folder: ("--observed-lengths", "constant:-1"),
        ("--observed-lengths", "constant:-1", "0 or more"),
    ),
    "turns without an environment": (
        lambda folder: ("--turns", "constant:2"),
        ("--turns", "environment", "sft has none", "leave it out"),
    ),
    "more memory than there is": (lambda folder: ("--gpu-memory-gib", "1e300"), ("1e300", "1,000,000")),
    "no folder": (lambda folder: ("--out", ""), ("--out",)),
    "a folder into which nothing can be written": (lambda folder: ("--out", "/proc/answer"), ("--out", "/proc")),
    "a sweep of which nothing divides": (
        lambda folder: ("--sweep", "actor.parallel.pp=3,5"),
        ("--sweep", "none of 2", "actor.parallel.pp=3"),
    ),
    "a sweep of models that are not there": (
        lambda folder: ("--sweep", f"actor.model.path={folder / 'one'},{folder / 'two'}"),
        ("--sweep", "none of 2"),
    ),
    "memory that is no number": (lambda folder: ("--gpu-memory-gib", "nan"), ("nan", "positive, finite number")),
    "experts that are not there": (
        lambda folder: ("--routing-skew", "2"),
        ("--routing-skew 2", "experts", "leave it out"),
    ),
    "a skew below the mean": (lambda folder: ("--routing-skew", "0.5"), ("0.5", "mean")),
    "engines that are not there": (
        lambda folder: ("--rollout-tokens-per-second", "9"),
        ("--rollout-tokens-per-second", "sft", "leave it out"),
    ),
    "an option twice": (lambda folder: ("--margin", "a", "--margin", "b"), ("--margin", "twice")),
    "an override of a misspelt key": (lambda folder: ("train.num_step=3",), ("train.num_step", "num_steps")),
    "a sweep over a misspelt key": (
        lambda folder: ("--sweep", "actor.parallel.pp=1,2", "train.mini_batch_sample=4,8"),
        ("--sweep train.mini_batch_sample", "unknown key"),
    ),
    "a sweep over a key below a value": (
        lambda folder: ("--sweep", "run.dir.x=4,8"),
        ("--sweep", "none of 2", "run.dir.x"),
    ),
    "a sweep without values": (lambda folder: ("--sweep", "train.num_steps="), ("--sweep", "section.key=value,value")),
    "a sweep with an unknown key in a hardware file": (
        lambda folder: ("--hardware", hardware_with(folder, unknown=1), "--sweep", "actor.parallel.pp=1,2"),
        ("unknown key", "unknown"),
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_is_refused(name, tmp_path, capsys) -> None:
    options, names = OPTIONS[name]
    out = tmp_path / "out"
    given = options(tmp_path)
    where = () if "--out" in given else ("--out", str(out))
    assert missing_names(refusal(capsys, "sft", "-c", sft(tmp_path), *where, *given), *names) == []
    assert not out.exists()


@pytest.mark.parametrize("sweep", [(), ("--sweep", "actor.parallel.pp=1,2")], ids=["", "sweep"])
def test_a_file_that_is_missing(sweep, tmp_path, capsys) -> None:
    """The nearest one is named."""
    sft(tmp_path)
    message = refusal(capsys, "sft", "-c", str(tmp_path / "stf.yaml"), "-o", str(tmp_path / "out"), *sweep)
    assert not missing_names(message, str(tmp_path / "sft.yaml"))
    assert not (tmp_path / "out").exists()


def test_a_model_without_its_config(tmp_path, capsys) -> None:
    file = sft(tmp_path)
    (tmp_path / "dense" / "config.json").unlink()
    message = refusal(capsys, "sft", "-c", file, "-o", str(tmp_path / "out"))
    assert not missing_names(message, str(tmp_path / "dense"), "config.json")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["file", "file/folder"])
def test_an_answer_where_a_file_is(name, tmp_path, capsys) -> None:
    (tmp_path / "file").write_text("mine")
    message = refusal(capsys, "sft", "-c", sft(tmp_path), "-o", str(tmp_path / name))
    assert not missing_names(message, f"--out {tmp_path / name}", f"{tmp_path / 'file'} is a file")
    assert (tmp_path / "file").read_text() == "mine"


SWEEP = ("--sweep", "train.max_tokens_per_micro_batch=192,256")


@pytest.mark.parametrize(
    ("name", "sweep"), [("rehearsal.json", ()), ("rehearsal.html", ()), ("sweep.json", SWEEP), ("best.yaml", SWEEP)]
)
def test_files_of_the_user_are_not_replaced(name, sweep, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(rehearse, "run_ranks", None)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("mine")
    message = refusal(capsys, "sft", "-c", sft(tmp_path), "-o", str(tmp_path / "out"), *sweep)
    assert "nothing is replaced" in message
    assert [path.name for path in (tmp_path / "out").iterdir()] == [name]
    assert (tmp_path / "out" / name).read_text() == "mine"


ENGINES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "an engine that does not divide the world": (
        {"rollout": {"parallel": {"tp": 8}}},
        ("rollout.parallel.tp = 8", "4 ranks"),
    ),
    "an engine that does not divide the heads": (
        {"model": {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 96}, "tp": 4},
        ("rollout.parallel.tp = 4",),
    ),
    "a reward model whose layout does not fit": (
        {"reward_model": {"parallel": {"tp": 3}}},
        ("reward_model.parallel", "world size 4", "3 x 1 x 1"),
    ),
    "a skew beyond all tokens": ({"model": EXPERTS, "skew": "3"}, ("--routing-skew 3", "2 times")),
}


@pytest.mark.parametrize("name", ENGINES)
def test_a_layout_does_not_fit(name, tmp_path, capsys) -> None:
    changes, names = ENGINES[name]
    tree = job_tree("rl", tmp_path)
    tree["reward_model"]["parallel"] = {}
    if "model" in changes:
        write_model(tmp_path / "dense", DENSE | changes["model"])
    if "tp" in changes:
        tree["rollout"]["parallel"] = {"tp": changes["tp"]}
    for section in ("rollout", "reward_model"):
        tree[section] |= changes.get(section, {})
    options = ("--routing-skew", changes["skew"]) if "skew" in changes else ()
    file = str(write_job("rl", tmp_path, tree))
    message = refusal(capsys, "rl", "-c", file, "-o", str(tmp_path / "out"), "--world-size", "4", *options)
    assert missing_names(message, *names) == []
    assert not (tmp_path / "out").exists()
