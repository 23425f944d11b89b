"""How one finds one's way: help, keys, completion, versions, the order of words, and words that are mistyped.

Not covered: completion inside a running zsh (its script is checked for syntax where zsh is installed).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megarlhf import __version__
from megarlhf.commands import cli
from megarlhf.commands.convert_arguments import DTYPES
from megarlhf.commands.plan_arguments import ORDERS
from megarlhf.config.reference import SET, all_paths
from megarlhf.planning import weight_traffic
from megarlhf.weights.checkpoint import conversion

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "megatron", "transformers", "datasets", "vllm", "numpy")


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Status, output and errors of a command."""
    try:
        status = cli.main(argv)
    except SystemExit as end:
        status = end.code  # type: ignore[assignment]
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def squeezed(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("name", list(cli.configurations()))
def test_help_lists_every_key_with_its_sentence(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = said(capsys, name, "--help")
    assert status == 0
    paths = all_paths(cli.configurations()[name])
    assert len(paths) > 5
    roles = {path.removesuffix(".model.path") for path in paths if path.endswith(".model.path")}
    for path, key in paths.items():
        section, _, rest = path.partition(".")
        names = {f"  {path}  [", f"  {key.path}  ["} if key.path.startswith(f"{SET}.") else {f"  {path}  ["}
        names |= {f"  ROLE.{rest}  ["} if section in roles else set()
        assert any(each in out for each in names), path
        assert squeezed(key.description) in squeezed(out), path
    assert "--config" in out


def test_a_part_of_the_keys(capsys: pytest.CaptureFixture[str]) -> None:
    """Below a section, with type, default and sentence; by a name; by a word of a sentence."""
    status, out, _ = said(capsys, "keys", "rl.algo.kl")
    assert status == 0
    lines = [line for line in out.splitlines() if line.startswith("  algo.kl.")]
    assert "  algo.kl.estimator  [k1 or k2 or k3 or abs or package.module:name; default k1]" in lines
    assert len(lines) == len([path for path in all_paths(cli.configurations()["rl"]) if path.startswith("algo.kl.")])
    assert "Schulman's estimators" in out
    _, out, _ = said(capsys, "keys", "lr")
    assert out.startswith("  ROLE.optim.lr  [number, above 0; default 1e-06]")
    assert "rl (critic)" in out
    _, out, _ = said(capsys, "keys", "rl.data.train.split")
    assert out.startswith("  data.train.split  [text or null; default null]")
    _, out, _ = said(capsys, "keys", "adapter")
    assert "  SET.adapter  [" in out
    words = "eval (data.train); sft, rm, dpo, rl (data.validation, data.test); rl (ptx.data)."
    assert words in squeezed(out)
    _, out, _ = said(capsys, "keys", "data.validation_share")
    assert squeezed(out).endswith("Read by sft, rm, dpo, rl."), "the others refuse it"
    _, out, _ = said(capsys, "keys", "Schulman's")
    assert out.startswith("  algo.kl.estimator  [")
    _, out, _ = said(capsys, "keys")
    assert int(out.splitlines()[-1].split()[0]) > 150


def test_what_is_mistyped_is_told_with_what_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    """One line, exit status 2."""
    for argv, expected in {
        ("stf", "-c", "x"): "megarlhf: unknown command 'stf'; did you mean sft? Known: sft, rm, ",
        ("sft", "-c", "x", "--dry-rn"): "megarlhf sft: unknown option --dry-rn; did you mean --dry-run?",
        ("sft", "-c", "x", "--run.nproc=2"): "a key of the configuration has no dashes before it: run.nproc=2",
        ("sft",): "megarlhf sft: -c/--config is missing; see `megarlhf sft --help`",
        ("convert", "inspct", "d"): "megarlhf convert: unknown command 'inspct'; did you mean inspect?",
        (
            "convert",
            "hf-to-megatron",
            "--hg",
            "x",
            "--out=y",
        ): "--hf is missing; unknown option --hg; did you mean --hf",
        (
            "convert",
            "gguf-to-hf",
            "--gguf",
            "x",
        ): "in a clone of megarlhf: python -m tools.gguf_to_hf --gguf FILE --out",
        ("convert", "inspect", "d", "--tensor-s"): "unknown option --tensor-s; did you mean --tensors?",
        ("plan", "-c", "x", "--oder", "rank"): "megarlhf plan: unknown option --oder; did you mean --order?",
        ("rehearse", "slf", "-c", "x"): "megarlhf rehearse: unknown command 'slf'; did you mean sft?",
        ("doctor", "please"): "megarlhf doctor: 'please' is one too many",
        ("completion", "ksh"): "unknown SHELL 'ksh'; did you mean zsh? Known: bash, zsh, fish",
        ("keys", "rl.algo.kl.estimatr"): "did you mean rl.algo.kl.estimator?",
        ("keys", "tmperature"): "no command, key or sentence has 'tmperature'; did you mean 'temperature'?",
    }.items():
        status, _, err = said(capsys, *argv)
        assert status == 2, argv
        assert expected in err, err
        assert err.count("\n") == 1, err


def test_a_mistake_is_told_by_the_first_rank_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank, lines in (("0", 1), ("3", 0)):
        monkeypatch.setenv("RANK", rank)
        status, _, err = said(capsys, "sft", "--nope")
        assert (status, err.count("\n")) == (2, lines)


CONFIG = "configs/plan/llama-3-70b.yaml"


@pytest.mark.parametrize(
    "argv",
    [
        ["plan", "-c", CONFIG, "--json", "--world-size", "64", "run.seed=3"],
        ["run.seed=3", "plan", "--json", "--world-size=64", "-c", CONFIG],
        ["--world-size", "64", "run.seed=3", "--json", "-c", CONFIG, "plan"],
        ["-c", CONFIG, "plan", "run.seed=3", "--json", "--world-size", "64"],
    ],
)
def test_words_in_any_order(
    argv: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command too may stand behind its options and overrides."""
    monkeypatch.chdir(ROOT)
    status, out, err = said(capsys, *argv)
    assert (status, err, out[0]) == (0, "", "{")


def test_a_rehearsal_s_words_in_any_order(capsys: pytest.CaptureFixture[str]) -> None:
    """Its command too, whose configuration is looked for."""
    for argv in (["sft", "-c", "x.yaml", "run.seed=3"], ["run.seed=3", "--steps", "1", "-c", "x.yaml", "sft"]):
        status, _, err = said(capsys, "rehearse", *argv)
        assert (status, err) == (2, "megarlhf rehearse: no configuration file x.yaml\n")


def test_a_value_is_not_taken_for_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """A file may be called as a command is."""
    status, _, err = said(capsys, "-c", "rl", "sft", "--dry-run")
    assert (status, err) == (2, "megarlhf sft: no configuration file rl\n")
    status, _, err = said(capsys, "convert", "--reference-hf", "verify", "inspect", "nowhere")
    assert (status, err.startswith("megarlhf convert inspect: ")) == (2, True)


def test_versions(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    status, out, _ = said(capsys, "--version")
    versions = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert status == 0
    assert versions["megarlhf"] == __version__
    assert versions["torch"] == torch.__version__
    assert versions["apex"] == "not installed"


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["keys", "lr"], ["completion", "bash"]], ids=" ".join)
def test_finding_ones_way_imports_nothing_heavy(argv: list[str]) -> None:
    """So that it takes a fraction of a second; and `convert --help`, whose work needs torch, neither."""
    code = (
        f"import sys\nfrom megarlhf.commands import cli\n"
        f"try:\n    cli.main({argv!r})\nexcept SystemExit as end:\n    assert end.code == 0\n"
        f"loaded = [name for name in {HEAVY!r} if name in sys.modules]\nassert not loaded, loaded"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("words", ["rl --help", "keys"])
def test_who_reads_the_beginning_only_sees_no_error(words: str) -> None:
    line = f"{sys.executable} -m megarlhf {words} | head -1; echo ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True)
    assert (ended.stderr, ended.stdout.splitlines()[-1]) == ("", "0")


def test_the_words_of_the_parsers_are_those_of_the_code() -> None:
    assert set(ORDERS) == weight_traffic.ORDERS.keys()
    assert set(DTYPES) == conversion.DTYPES.keys()


COMPLETIONS = {
    "megarlhf s": ["serve-reward", "sft"],
    "megarlhf --v": ["--version"],
    "megarlhf rl --d": ["--dry-run"],
    "megarlhf rl alg": ["algo."],
    "megarlhf rl run.nproc=2 algo.kl.est": ["algo.kl.estimator="],
    "megarlhf rl algo.kl.estimator=k": ["k1", "k2", "k3"],
    "megarlhf plan actor.par": ["actor.parallel."],
    "megarlhf keys r": ["rl", "rm"],
    "megarlhf completion z": ["zsh"],
    "megarlhf convert rel": ["relayout"],
    "megarlhf rl -c configs/exam": ["configs/example"],
}


def test_bash_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Commands, options, keys section by section, and what a key may say: as a Tab asks for it."""
    _, out, _ = said(capsys, "completion", "bash")
    (tmp_path / "completion").write_text(out)
    asked = "\n".join(
        f'COMP_LINE="{line}"; COMP_POINT={len(line)}; COMPREPLY=(); _megarlhf; echo "${{COMPREPLY[*]}}"'
        for line in COMPLETIONS
    )
    prelude = f"source {tmp_path / 'completion'}; compopt() {{ :; }}; COMP_WORDBREAKS=$' \\t\\n=:'"
    answer = subprocess.run(["bash", "-c", f"{prelude}\n{asked}"], cwd=ROOT, capture_output=True, text=True)
    assert answer.stderr == ""
    assert dict(zip(COMPLETIONS, map(str.split, answer.stdout.splitlines()), strict=True)) == COMPLETIONS


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_take_their_script(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = said(capsys, "completion", shell)
    for word in ("serve-reward", "--dry-run", "algo.kl.estimator=", "algo.kl.estimator=k2"):
        assert word in out
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    (tmp_path / "completion").write_text(out)
    checked = subprocess.run([shell, "-n", tmp_path / "completion"], capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")
