"""Data that several processes tokenize: the same files as one makes, and what is said where one of them ends."""

import os
import pickle
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from megarlhf.config import SourceConfig
from megarlhf.data.samples.encoders import SFTEncoder, SFTSample
from megarlhf.data.tokenize import workers as encode
from megarlhf.data.tokenize.workers import EncodingJob
from tests.data.counting import ROWS, Counting, entries, loader, write
from tests.refuses import refuses


@pytest.fixture
def workers_at_once(monkeypatch):
    """Chunks of five rows, of which workers encode all that they have room for."""

    def ready(pool):
        while pool._idle.empty() and not pool._has_begun:
            time.sleep(0.01)
        pool._has_begun = True
        return True

    monkeypatch.setattr("megarlhf.data.sources.read.CHUNK_ROWS", 5)
    monkeypatch.setattr(encode, "ALONE_SECONDS", 0.0)
    monkeypatch.setattr(encode._Pool, "is_ready", property(ready))


def test_any_number_of_processes_makes_the_same_files(place, tmp_path, workers_at_once):
    """The first row that is refused is the one that is named."""
    encoder = Counting(tmp_path / "log")
    alone, _, notes = loader({**place, "workers": 1}, encoder).train_and_validation("sft")
    second = {**place, "workers": 2, "cache": str(tmp_path / "second")}
    several, _, said = loader(second, encoder).train_and_validation("sft")
    assert several.digest() == alone.digest()
    assert list(several) == list(alone)
    assert said == notes
    by_process = Counter(int(line.split()[0]) for line in encoder.log.read_text().splitlines()[41:])
    assert os.getpid() in by_process
    assert len(by_process) == 2
    assert sum(by_process.values()) == 41
    write(place["train"], [*ROWS[:20], *[{"prompt": "x", "response": "refused"}] * 20])
    with refuses("rows.jsonl, line 21", "refused"):
        loader(second, encoder).train_and_validation("sft")


@pytest.mark.parametrize("workers", [1, 2])
def test_the_first_error_of_a_file_is_said(place, tmp_path, workers_at_once, workers):
    """A refused row stands before a place from which the file cannot be read."""
    lines = ["prompt,response", *(f"{n},{n}" for n in range(12)), "x,refused", *["1,2"] * 10, "1,2,3"]
    (tmp_path / "rows.csv").write_text("\n".join(lines) + "\n")
    data = {"train": tmp_path / "rows.csv", "cache": place["cache"], "workers": workers}
    with refuses("rows.csv, line 14", "refused"):
        loader(data, Counting(tmp_path / "log")).train_and_validation("sft")
    lines[13] = "1,2"
    (tmp_path / "rows.csv").write_text("\n".join(lines) + "\n")
    with refuses("rows.csv, line 25", "3 cells", "2 columns"):
        loader(data, Counting(tmp_path / "log")).train_and_validation("sft")


def test_a_worker_that_is_killed_is_said(place, tmp_path, workers_at_once, monkeypatch):
    """Where a worker starts late, this process would take back the row at which it is to be killed."""
    monkeypatch.setattr(encode.Future, "cancel", lambda future: False)
    encoder = Counting(tmp_path / "log", stops_at=12)

    def kill():
        while 12 not in encoder.encoded():
            time.sleep(0.02)
        line = next(line for line in encoder.log.read_text().splitlines() if line.endswith(" 12"))
        assert int(line.split()[0]) != os.getpid()
        os.kill(int(line.split()[0]), signal.SIGKILL)

    with ThreadPoolExecutor(1) as thread:
        killing = thread.submit(kill)
        with refuses("status -9", "rows.jsonl, line 11 to 15", error=RuntimeError):
            loader({**place, "workers": 3}, encoder).train_and_validation("sft")  # two beside this one
        killing.result()
    assert entries(place) == []


@pytest.mark.parametrize("left_out", [1, 9, None])
def test_a_worker_whose_parent_was_killed_ends_without_a_word(tmp_path, left_out):
    """Also in the middle of what it was being told; `None`: before it was told anything."""
    job = pickle.dumps(EncodingJob(SourceConfig(path=tmp_path), Counting(tmp_path / "log"), SFTSample, ()))
    told = b"" if left_out is None else job[:-left_out]
    command = [sys.executable, "-m", "megarlhf.data.tokenize.workers"]
    done = subprocess.run(command, input=told, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_a_worker_loads_its_tokenizer_without_torch(place, tmp_path, workers_at_once, fast_tokenizer, monkeypatch):
    """With a chat template; an adapter of the user's imports it all the same."""
    fast_tokenizer(prefix=False, bos_token="<s>", eos_token="</s>").save_pretrained(tmp_path / "model")
    (tmp_path / "with_torch.py").write_text(
        "import sys\ndef read(row):\n    assert 'torch' not in sys.modules or sys.modules['torch'] is not None\n"
        "    import torch\n    return {**row, 'n': int(torch.tensor(3))}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    options = {"template": "chat", "max_prompt_tokens": 64, "max_response_tokens": 64}
    encoder = SFTEncoder(tokenizer=tmp_path / "model", **options)
    source = {"path": place["train"], "adapter": "with_torch:read"}
    alone, several = (
        loader({"train": source, "workers": count, "cache": str(tmp_path / f"cache{count}")}, encoder)
        for count in (1, 2)
    )
    expected = list(alone.train_and_validation("sft")[0])
    assert list(several.train_and_validation("sft")[0]) == expected
    assert len(expected) == 40
