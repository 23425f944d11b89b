"""What a conversion does when its inputs are damaged, the disk is full, or it is killed. Found (an error that names the
file) or survived (a whole result); never half a result that looks whole. A flipped bit inside a number of safetensors
cannot be known from the file: the format has no checksums. `verify` sees it."""

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarlhf.weights.checkpoint import staging
from megarlhf.weights.checkpoint.checksums import check_checksums
from megarlhf.weights.checkpoint.conversion import HuggingFaceTarget, MegatronTarget, convert
from megarlhf.weights.checkpoint.open_checkpoint import detect_format, open_checkpoint
from megarlhf.weights.checkpoint.verify import digests
from tests.refuses import refuses
from tests.weights.models import write_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    root = tmp_path_factory.mktemp("inputs")
    hf = write_model("llama", root / "safetensors", dtype=torch.bfloat16, max_shard_size="100KB")
    convert(open_checkpoint(hf), root / "torch_dist", MegatronTarget(tp=2))
    convert(open_checkpoint(hf), root / "mp_rank", MegatronTarget(tp=2, pp=2, format="mp_rank"))
    (root / "bin").mkdir()
    state = {name: value for path in hf.glob("*.safetensors") for name, value in load_file(path).items()}
    torch.save(state, root / "bin" / "pytorch_model.bin")
    shutil.copyfile(hf / "config.json", root / "bin" / "config.json")
    return root


def target_for(kind: str):
    return MegatronTarget(tp=2, format="mp_rank") if kind in ("safetensors", "bin") else HuggingFaceTarget()


def convert_damaged(source: Path, out: Path, kind: str, expected: dict[str, int] | None = None) -> str:
    """`found`, or `survived` with a result that opens, and holds what is `expected`, if known."""
    message = ""
    try:
        convert(open_checkpoint(source), out, target_for(kind))
    except (ValueError, OSError) as error:
        message = str(error)
    if message:
        assert not out.exists(), f"{message} left a directory"
        assert len(message) > 30, "says what to do"
        return "found"
    assert expected in (None, digests(open_checkpoint(out))), "survived with other numbers"
    open_checkpoint(out)
    shutil.rmtree(out)
    return "survived"


def files_of(directory: Path) -> list[Path]:
    return sorted(path.relative_to(directory) for path in directory.rglob("*") if path.is_file())


def flip(path: Path, offset: int, bits: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ bits]))


@pytest.mark.parametrize("kind", ["safetensors", "bin", "torch_dist", "mp_rank"])
def test_truncated_and_missing_files(inputs, tmp_path, kind):
    """Every file that a conversion reads, cut at four lengths and removed: always found."""
    needed = [
        name
        for name in files_of(inputs / kind)
        if name.suffix in (".safetensors", ".bin", ".distcp", ".pt") or name.name in (".metadata", "common.pt")
    ]
    needed += [Path("config.json")] if kind in ("safetensors", "bin") else []
    assert len(needed) >= 2
    for name in needed:
        size = (inputs / kind / name).stat().st_size
        for length in (0, 1, size // 2, size - 2, None):
            copied = tmp_path / "in"
            shutil.copytree(inputs / kind, copied)
            if length is None:
                (copied / name).unlink()
            else:
                with (copied / name).open("r+b") as file:
                    file.truncate(length)
            if (name.name, length) not in HARMLESS:
                assert convert_damaged(copied, tmp_path / "out", kind) == "found", (name, length)
            shutil.rmtree(copied)
    assert not list(tmp_path.iterdir())


HARMLESS: set[tuple[str, int | None]] = {("common.pt", None)}
"""Damage that may stay: with config.json at hand nobody needs Megatron's arguments."""


@pytest.mark.parametrize("kind", ["safetensors", "bin", "torch_dist", "mp_rank"])
def test_flipped_bytes(inputs, tmp_path, kind):
    """A random bit of a random byte, most of them in headers and metadata: an error of ours, or the same model,
    unless the bit is one of a number."""
    generator = random.Random(5)
    outcomes, compared = [], 0
    original = open_checkpoint(inputs / kind)
    numbers = [extent for extents in original.weights.extents for extent in extents.values()]
    right = digests(original)
    for name in files_of(inputs / kind):
        size = (inputs / kind / name).stat().st_size
        places = {generator.randrange(size) for _ in range(4)} | {generator.randrange(min(size, 600)) for _ in range(6)}
        for place in sorted(places):
            copied = tmp_path / "in"
            shutil.copytree(inputs / kind, copied)
            flip(copied / name, place, 1 << generator.randrange(8))
            in_number = any(e.path == inputs / kind / name and e.offset <= place < e.end for e in numbers)
            outcomes.append(convert_damaged(copied, tmp_path / "out", kind, None if in_number else right))
            compared += not in_number and outcomes[-1] == "survived"
            shutil.rmtree(copied)
    assert not list(tmp_path.iterdir())
    assert compared > 0
    assert outcomes.count("found") > 5
    assert len(outcomes) > 15


def test_a_file_name_flipped_into_another(inputs, tmp_path):
    """`__1_0.distcp` and `__3_0.distcp` differ in one bit and have the same layout: every bit of every name."""
    source, outcomes = tmp_path / "in", []
    convert(open_checkpoint(inputs / "safetensors"), source, MegatronTarget(tp=4))
    metadata = source / "release" / ".metadata"
    raw = metadata.read_bytes()
    for rank in range(4):
        name = f"__{rank}_0.distcp".encode()
        assert raw.count(name) == 1
        for place in range(raw.index(name), raw.index(name) + len(name)):
            for bit in range(8):
                damaged = bytearray(raw)
                damaged[place] ^= 1 << bit
                metadata.write_bytes(bytes(damaged))
                with pytest.raises(ValueError) as error:  # noqa: PT011 -- many kinds; that it is found is the point
                    open_checkpoint(source)
                outcomes.append("two chunks begin at" in str(error.value))
    assert outcomes.count(True) >= 4
    metadata.write_bytes(raw)
    assert digests(open_checkpoint(source)) == digests(open_checkpoint(inputs / "safetensors"))


def test_a_flipped_bit_in_a_number_is_seen_by_verify(inputs, tmp_path):
    shutil.copytree(inputs / "safetensors", tmp_path / "in")
    path = sorted((tmp_path / "in").glob("*.safetensors"))[0]
    flip(path, path.stat().st_size - 1, 1)
    assert digests(open_checkpoint(tmp_path / "in")) != digests(open_checkpoint(inputs / "safetensors"))


KILLED = """
import os, signal, sys
import torch
from pathlib import Path
from megarlhf.weights.transport import file_copy as transfer
from megarlhf.weights.checkpoint.checksums import check_checksums
from megarlhf.weights.checkpoint.conversion import HuggingFaceTarget, MegatronTarget, convert
from megarlhf.weights.checkpoint import staging
from megarlhf.weights.checkpoint.open_checkpoint import open_checkpoint

torch.set_num_threads(1)
transfer.ITEM_BYTES = 2000
source, out = Path(sys.argv[1]), Path(sys.argv[2])

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def run(moment):
    written = []
    def progress(count):
        written.append(count)
        if len(written) == moment:
            die()
    if isinstance(moment, str):
        name, when = moment.split()
        real = getattr(staging.os, name)
        def dying(*args):
            if when == "before":
                die()
            real(*args)
            die()
        setattr(staging.os, name, dying)
    target = HuggingFaceTarget() if "mp_rank" in str(source) else MegatronTarget(tp=2, pp=2, format="mp_rank")
    convert(open_checkpoint(source), out, target, progress=progress, force=True)

for moment in [1, 2, 10, 50, 100, "fsync before", "fsync after", "rename before", "rename after", 150, 0]:
    child = os.fork()
    if child == 0:
        run(moment)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print(moment, status, out.exists(), sorted(p.name for p in out.parent.iterdir()), flush=True)
"""


@pytest.mark.parametrize("kind, place", [("safetensors", "disk_path"), ("mp_rank", "tmp_path")])
def test_sigkill_at_ten_moments(inputs, kind, place, request):
    """After each kill there is no directory under the final name, unless the rename was the last thing done; the run
    after the last kill finishes, and nothing else is left. Once on a disk, whatever lies in memory otherwise."""
    out = request.getfixturevalue(place) / "results" / "out"
    out.parent.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(inputs / kind), str(out)], capture_output=True, text=True, cwd=ROOT,
        check=True, timeout=300,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert len(lines) == 11, done.stdout + done.stderr
    for line in lines[:10]:
        whole = "rename after" in line or line.startswith("150 ")
        assert f" 9 {whole} " in line, line
    assert lines[10] == "0 0 True ['out']"
    assert digests(open_checkpoint(out)) == digests(open_checkpoint(inputs / "safetensors"))


def test_a_full_disk_is_found_before_writing(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6 - 1000, 1000))
    with refuses("GB", str(tmp_path / "out"), "0.000 GB", error=OSError):
        convert(open_checkpoint(inputs / "safetensors"), tmp_path / "out", MegatronTarget())
    assert not list(tmp_path.iterdir())


FULL = """
import sys
from pathlib import Path
from megarlhf.commands.convert import main
from megarlhf.weights.checkpoint.staging import Staging
if sys.argv[3] == "unchecked":
    Staging.reserve = lambda self, num_bytes: None
sys.exit(main(["hf-to-megatron", "--hf", sys.argv[1], "--out", sys.argv[2] + "/out", "--format", "mp_rank"]))
"""


@pytest.mark.parametrize("how", ["checked", "unchecked"])
def test_a_small_tmpfs(inputs, tmp_path, how):
    """A real full disk; `unchecked` as when somebody else fills it meanwhile: the error comes from the write."""
    small = tmp_path / "small"
    small.mkdir()
    script = tmp_path / "full.py"
    script.write_text(FULL)
    command = (
        f"mount -t tmpfs -o size=200k tmpfs {small} && "
        f"{sys.executable} {script} {inputs / 'safetensors'} {small} {how}; echo status $?; ls -A {small}"
    )
    done = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "sh", "-c", command], capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False, timeout=300,
    )  # fmt: skip
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no private mounts here: {done.stderr.strip()}")
    assert done.stdout == "status 2\n", done.stdout + done.stderr
    expected = "GB are needed beside" if how == "checked" else "No space left on device"
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("form", ["torch_dist", "mp_rank"])
def test_checksums_find_a_flipped_bit_in_a_number(inputs, tmp_path, form):
    """Written on demand; without them `check_checksums` says that there is nothing to compare."""
    source = open_checkpoint(inputs / "safetensors")
    convert(source, tmp_path / "silent", MegatronTarget(tp=2, format=form))
    count, silent = check_checksums(tmp_path / "silent")
    assert count == silent >= 2
    convert(source, tmp_path / "stated", MegatronTarget(tp=2, format=form), checksums=True)
    assert check_checksums(tmp_path / "stated") == (count, 0)
    assert digests(open_checkpoint(tmp_path / "stated")) == digests(source)
    (extent,) = list(open_checkpoint(tmp_path / "stated").weights.extents[0].values())[3:4]
    flip(extent.path, extent.offset + 5, 4)
    with refuses("damaged records", "CRC-32", "copy it again"):
        check_checksums(tmp_path / "stated")


def test_checksums_of_bin_files_find_a_flipped_bit(inputs, tmp_path):
    """torch.save writes them; no flag is needed."""
    shutil.copytree(inputs / "bin", tmp_path / "bin")
    count, silent = check_checksums(tmp_path / "bin")
    assert count > silent == 0
    extent = open_checkpoint(tmp_path / "bin").weights.extents[0]["model.norm.weight"]
    flip(extent.path, extent.offset, 1)
    with refuses("pytorch_model.bin", "CRC-32", "copy it again"):
        check_checksums(tmp_path / "bin")


def test_recognise_says_what_it_looked_for(tmp_path):
    with refuses("nowhere", "not a directory"):
        detect_format(tmp_path / "nowhere")
    with refuses(str(tmp_path), "no checkpoint", "Hugging Face weights"):
        detect_format(tmp_path)
