"""The converter as a user types it. Values are compared in tests/weights; here: commands, messages, exit statuses."""

import contextlib
import io
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megarlhf.architectures.placements import logical_tensors
from megarlhf.commands import cli
from megarlhf.commands.convert import main
from megarlhf.weights.checkpoint.conversion import HuggingFaceTarget, convert
from megarlhf.weights.checkpoint.open_checkpoint import open_checkpoint
from megarlhf.weights.checkpoint.verify import digests
from tests.ranks import RankPool
from tests.refuses import missing_names
from tests.weights.models import write_model

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model("llama", tmp_path_factory.mktemp("cli") / "llama", dtype=torch.bfloat16)


def test_the_module_from_a_shell_without_megatron_or_transformers(model, tmp_path):
    code = (
        "import sys; from megarlhf.commands.convert import main; status = main(sys.argv[1:]);"
        "heavy = {'megatron', 'transformers', 'vllm', 'pydantic', 'datasets'} & {m.split('.')[0] for m in sys.modules};"
        "print('heavy', sorted(heavy)); sys.exit(status)"
    )
    arguments = ["hf-to-megatron", "--hf", str(model), "--out", str(tmp_path / "a"), "--tp", "2", "--pp", "2"]
    options = {"cwd": ROOT, "capture_output": True, "text": True, "check": False, "env": os.environ}
    done = subprocess.run([sys.executable, "-c", code, *arguments], **options)
    assert done.returncode == 0, done.stderr
    wrote, heavy = done.stdout.splitlines()
    assert not missing_names(wrote, str(tmp_path / "a"), "0.000 GB")
    assert heavy == "heavy []"
    assert "converting: " in done.stderr
    assert " s left" in done.stderr
    assert "Warning" not in done.stderr


def test_a_session(model, tmp_path, capsys):
    a, b, back = (str(tmp_path / name) for name in ("a", "b", "back"))
    assert main(["hf-to-megatron", "--hf", str(model), "--out", a, "--tp", "2", "--format", "mp_rank"]) == 0
    command = ["relayout", "--megatron", a, "--out", b, "--pp", "3", "--layers-per-stage", "1,1,2", "--dtype", "fp32"]
    assert main(command) == 0
    assert main(["megatron-to-hf", "--megatron", b, "--out", back, "--max-shard-size", "0.1MB"]) == 0
    assert len(list(Path(back).glob("*.safetensors"))) > 1
    capsys.readouterr()
    assert main(["verify", str(model), back]) == 1
    assert not missing_names(capsys.readouterr().out, "torch.bfloat16", "torch.float32", "--dtype")
    assert main(["verify", str(model), back, "--dtype", "bf16"]) == 0
    assert not missing_names(capsys.readouterr().out, "same model", "39 tensors", "digest")
    assert main(command) == 2
    assert not missing_names(capsys.readouterr().err, b, "exists already")
    assert main([*command, "--force"]) == 0


def test_inspect_says_what_it_is(model, tmp_path, capsys):
    out = str(tmp_path / "a")
    main(["hf-to-megatron", "--hf", str(model), "--out", out, "--tp", "2", "--pp", "2", "--format", "mp_rank"])
    capsys.readouterr()
    assert main(["inspect", out, "--tensors"]) == 0
    printed = capsys.readouterr().out
    parts = ("mp_rank", "tp 2, pp 2, vpp 1, ep 1", "llama, language model", "release", "4 of 16, 2 KV", "bfloat16")
    first_rows = printed.splitlines()[1:3]
    assert [row[0] for row in first_rows] == ["┌", "│"], f"a header without words: {first_rows}"
    assert not missing_names(printed, *parts, "decoder.layers.1.self_attention.linear_qkv.weight")
    for form in ("torch_dist", "mp_rank"):
        for stages in ("1,2,1", "1,1,2", "2,1,1"):
            there = str(tmp_path / f"{form}{stages}")
            options = ["--pp", "3", "--layers-per-stage", stages, "--format", form]
            main(["hf-to-megatron", "--hf", str(model), "--out", there, *options])
            capsys.readouterr()
            assert main(["inspect", there]) == 0
            assert f"layers per stage: {', '.join(stages.split(','))}" in flat(capsys.readouterr().out)
    assert main(["inspect", str(model), "--check"]) == 0
    assert "digest of the model: " in capsys.readouterr().out


def flat(printed):
    rows = ([cell.strip() for cell in line.strip("│┃ ").replace("┃", "│").split("│")] for line in printed.splitlines())
    return "\n".join(": ".join(row) for row in rows)


@pytest.mark.parametrize("arguments, names", [
    (["inspect", "nowhere"], "nowhere|not a directory"),
    (["hf-to-megatron", "--hf", "MODEL", "--out", "x", "--tp", "3"], "tp = 3"),
    (["megatron-to-hf", "--megatron", ".", "--out", "x"], "no checkpoint"),
])  # fmt: skip
def test_mistakes_are_said_in_one_line(model, tmp_path, capsys, monkeypatch, arguments, names):
    monkeypatch.chdir(tmp_path)
    assert main([str(model) if argument == "MODEL" else argument for argument in arguments]) == 2
    stderr = capsys.readouterr().err
    assert not missing_names(stderr, *names.split("|"))
    assert stderr.startswith("python -m tools.checkpoint_convert")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("out", ["file/x/y", "file"])
def test_an_output_that_cannot_be_a_directory_is_refused_before_anything_is_read(tmp_path, capsys, out):
    """The source is not there either: it would have been said if it had been looked at."""
    (tmp_path / "file").write_text("mine")
    for command in (["hf-to-megatron", "--hf"], ["megatron-to-hf", "--megatron"], ["relayout", "--megatron"]):
        assert main([*command, str(tmp_path / "absent"), "--out", str(tmp_path / out), "--force"]) == 2
        assert not missing_names(capsys.readouterr().err, f"--out {tmp_path}/{out}", "a file", "name a directory")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "mine"


def test_megarlhf_convert_is_the_same_code(model, capsys):
    assert cli.main(["convert", "inspect", str(model)]) == 0
    assert "huggingface" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["convert", "--help"])
    assert "hf-to-megatron" in capsys.readouterr().out


def test_a_root_without_its_tracker_and_a_mount_point(model, tmp_path, capsys):
    assert main(["hf-to-megatron", "--hf", str(model), "--out", str(tmp_path / "a")]) == 0
    (tmp_path / "a" / "release").rename(tmp_path / "a" / "iter_0000042")
    (tmp_path / "a" / "latest_checkpointed_iteration.txt").unlink()
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "a")]) == 2
    assert not missing_names(capsys.readouterr().err, "which", "iter_0000042")
    assert main(["inspect", str(tmp_path / "a" / "iter_0000042"), "--reference-hf", str(model)]) == 0
    assert main(["hf-to-megatron", "--hf", str(model), "--out", "/dev/shm"]) == 2
    assert not missing_names(capsys.readouterr().err, "/dev/shm", "mount point")
    with pytest.raises(SystemExit):
        main(["megatron-to-hf", "--megatron", "a", "--out", "b", "--max-shard-size", "0"])
    assert not missing_names(capsys.readouterr().err, "--max-shard-size", "positive size")


@pytest.mark.parametrize("text", ["0", "-1", "two"])
def test_numbers_are_checked(text, capsys):
    with pytest.raises(SystemExit):
        main(["hf-to-megatron", "--hf", "a", "--out", "b", "--tp", text])
    assert not missing_names(capsys.readouterr().err, "--tp", "positive whole number")


def converter(*arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "tools.checkpoint_convert", *map(str, arguments)],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options,
    )  # fmt: skip


def test_more_files_than_descriptors(tmp_path):
    """A file for each of 477 tensors, then 16 files of ranks, in processes that may hold 64 open."""
    source = tmp_path / "source"
    write_model("qwen3_moe", source, dtype=torch.bfloat16, num_experts=32)
    shards, megatron, back = (tmp_path / name for name in ("shards", "megatron", "back"))
    convert(open_checkpoint(source), shards, HuggingFaceTarget(max_shard_bytes=1))
    assert len(list(shards.glob("*.safetensors"))) == len(logical_tensors(open_checkpoint(source).arch)) > 400
    limits = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))}
    layout = ["--tp", "2", "--ep", "8", "--format", "mp_rank"]
    there = converter("hf-to-megatron", "--hf", shards, "--out", megatron, *layout, **limits)
    assert there.wait() == 0, there.communicate()
    options = ("--max-shard-size", "1", "--workers", "8")
    again = converter("megatron-to-hf", "--megatron", megatron, "--out", back, *options, **limits)
    assert again.wait() == 0, again.communicate()
    assert main(["verify", str(source), str(back)]) == 0


def _convert_at_once(runtime, *command):
    """(exit status, what was said) of the command, begun by all ranks together."""
    dist.barrier()
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        return main(command), stderr.getvalue()


def test_two_writers_of_one_directory(model, tmp_path, ranks: RankPool):
    """Both with --force, at once, three times: each finishes or says that the other is at work; the result is whole."""
    out = tmp_path / "out"
    statuses = []
    for _ in range(3):
        command = ["hf-to-megatron", "--hf", str(model), "--out", str(out), "--tp", "2", "--force"]
        for status, stderr in ranks.run(2, _convert_at_once, *command):
            statuses.append(status)
            assert status == 0 or "another process is writing" in stderr, stderr
        assert digests(open_checkpoint(out)) == digests(open_checkpoint(model))
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert statuses.count(0) >= 3


def test_what_stands_beside_the_weights(model, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(model, source)
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    (source / "original").mkdir()
    (source / "tokenizer.json").write_text("{}")
    a, back = tmp_path / "a", tmp_path / "back"
    assert main(["hf-to-megatron", "--hf", str(source), "--out", str(a)]) == 0
    assert main(["megatron-to-hf", "--megatron", str(a), "--out", str(back)]) == 0
    assert (back / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tools }}"
    assert (back / "tokenizer.json").read_text() == "{}"
    assert not (back / "original").exists()
    for name in ("rust_model.ot", "model-64-fp16.tflite", "model.ckpt.data-00000-of-00001"):
        (source / name).write_text("weights once more")
    shutil.copyfile(source / "config.json", a / "config.json")  # the root is then its own description
    assert main(["hf-to-megatron", "--hf", str(source), "--out", str(tmp_path / "b")]) == 0
    assert main(["megatron-to-hf", "--megatron", str(a), "--out", str(tmp_path / "c")]) == 0
    shutil.copyfile(source / "config.json", a / "release" / "config.json")
    assert main(["megatron-to-hf", "--megatron", str(a / "release"), "--out", str(tmp_path / "d")]) == 0
    small = {"config.json", "generation_config.json", "tokenizer.json", "additional_chat_templates"}
    assert {path.name for path in (tmp_path / "b" / "hf").iterdir()} == small
    for copied in ("c", "d"):
        assert {path.name for path in (tmp_path / copied).iterdir()} == {"config.json", "model.safetensors"}


def test_a_link_that_leads_nowhere(model, tmp_path, capsys):
    shutil.copytree(model, tmp_path / "source")
    (tmp_path / "source" / "tokenizer.json").symlink_to(tmp_path / "gone")
    assert main(["hf-to-megatron", "--hf", str(tmp_path / "source"), "--out", str(tmp_path / "a")]) == 2
    assert not missing_names(capsys.readouterr().err, "tokenizer.json", "a link")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
