"""A configuration through a pipe, as `-c <(...)` gives it, is a file like any other."""

import os
from pathlib import Path

import pytest

from megarlhf.commands import cli
from megarlhf.commands.arguments.piped import without_pipes


@pytest.fixture
def pipe():
    """A function that makes one with a text in it: its path."""
    opened = []

    def make(text):
        reader, writer = os.pipe()
        opened.append(reader)
        os.write(writer, text.encode())
        os.close(writer)
        return f"/dev/fd/{reader}"

    yield make
    for reader in opened:
        os.close(reader)


@pytest.mark.parametrize("option", ["-c", "--config", "--config="])
def test_a_pipe_can_be_read_again_and_what_keeps_it_is_removed(pipe, tmp_path, option):
    (tmp_path / "file.yaml").write_text("")
    words = [option + pipe("a: 1\n")] if option.endswith("=") else [option, pipe("a: 1\n")]
    with without_pipes(["sft", *words, "run.seed=3"]) as given:
        file = Path(given[-2].removeprefix("--config="))
        assert [file.read_text(), file.read_text()] == ["a: 1\n"] * 2
        assert (given[0], given[-1], len(given)) == ("sft", "run.seed=3", len(words) + 2)
    assert not file.parent.exists()
    for others in (["sft", "-c", str(tmp_path / "file.yaml")], ["sft", "-c", "not there"], ["sft", "-c"], []):
        with without_pipes(others) as given:
            assert given == others


@pytest.mark.parametrize("name", ["-", "/dev/stdin"])
def test_standard_input_is_one_whatever_it_is(pipe, tmp_path, capsys, name):
    """A pipe, and a file (`< FILE`), which a rank could not read after the process that starts it."""
    (tmp_path / "file.yaml").write_text("run: {dir: x, sead: 1}\n")
    before = os.dup(0)
    try:
        for source in (pipe("run: {dir: x, sead: 1}\n"), str(tmp_path / "file.yaml")):
            file = os.open(source, os.O_RDONLY)
            os.dup2(file, 0)
            os.close(file)
            assert cli.main(["sft", "-c", name, "--dry-run"]) == 2
            assert "unknown key 'run.sead'" in capsys.readouterr().err
    finally:
        os.dup2(before, 0)
        os.close(before)


def test_a_command_reads_it(pipe, capsys):
    """As far as a mistake in it; the exit status is that of a user's mistake."""
    assert cli.main(["sft", "-c", pipe("run: {dir: x, sead: 1}\n"), "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "unknown key 'run.sead'" in said
    assert "no configuration file" not in said
