"""The cache of tokenized data: made once, whoever asks and however often; whole or not there; another key for whatever
makes other samples. Not covered: file systems of several machines, on which `rename` and exclusive creation are taken
to be atomic."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megarlhf.data.samples.encoders import SFTEncoder, SFTSample
from megarlhf.data.tokenize import cache
from megarlhf.data.tokenize.load import SetLoader
from tests.data.counting import ROWS, Counting, entries, loader, write
from tests.refuses import missing_names, refuses
from tools.demo.make_data import train_tokenizer


def in_a_process(place, encoder):
    """Loads in a process of its own, which prints the digest or the error."""
    data = {**place, "train": str(place["train"])}
    code = (
        "from pathlib import Path; from tests.data.counting import Counting, digest_of\n"
        f"try: print(digest_of({data!r}, Counting(**{ {**vars(encoder), 'log': str(encoder.log)}!r} | "
        f"{{'log': Path({str(encoder.log)!r})}})))\nexcept ValueError as error: print('refused:', error)"
    )
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, process_group=0)


def test_the_second_start_reads_and_encodes_nothing(place, tmp_path):
    """By count. Nor does one of a copy elsewhere; the reasons of what was skipped are kept."""
    encoder = Counting(tmp_path / "log")
    train, held, (note,) = loader(place, encoder).train_and_validation("sft")
    assert (len(train), held, encoder.encoded()) == (40, [], list(range(41)))
    assert not missing_names(note, "WARNING", str(place["train"]), "1 of 41 records", "empty response: 1", "2.4 %")
    copied = shutil.copy(place["train"], tmp_path / "copy.jsonl")
    for file in (place["train"], copied):
        again, _, said = loader({**place, "train": file}, encoder).train_and_validation("sft")
        assert list(again) == list(train)
        assert again.digest() == train.digest()
        assert said == [note.replace(str(place["train"]), str(file))]
    assert encoder.encoded() == list(range(41))
    assert len(entries(place)) == 1


def test_a_file_whose_size_and_time_are_known_is_not_read_again(place, monkeypatch):
    directory, file = Path(place["cache"]), place["train"]
    digest = cache.digest_of_file(file, directory)
    monkeypatch.setattr(cache.hashlib, "file_digest", lambda *_: pytest.fail("read again"))
    assert cache.digest_of_file(file, directory) == digest
    monkeypatch.undo()
    write(file, [{"prompt": "0+1=", "response": "2"}, *ROWS[1:], {"prompt": "x", "response": ""}])  # of the same size
    assert cache.digest_of_file(file, directory) != digest
    write(file, [*ROWS, {"prompt": "x", "response": ""}])
    assert cache.digest_of_file(file, directory) == digest, "just written: read each time"


def test_whatever_makes_other_samples_is_another_key(place, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.model").write_bytes(train_tokenizer())
    limits = {"max_prompt_tokens": 6, "max_response_tokens": 3}

    def digest(rows=ROWS, over_long="drop", columns=None, **options):
        file = write(tmp_path / "a.jsonl", rows)
        source = {"path": file, "columns": columns or {}}
        encoder = SFTEncoder(tokenizer=tmp_path / "model", **{**limits, **options})
        data = {"train": source, "cache": place["cache"], "over_long": over_long, "max_skipped": 1}
        SetLoader(loader(data, encoder).data, encoder, SFTSample).train_and_validation("sft")
        return len(entries(place))

    assert digest() == 1
    assert digest() == 1
    assert digest(max_prompt_tokens=5) == 2
    assert digest(max_response_tokens=2) == 3
    assert digest(over_long="cut") == 4
    assert digest(rows=ROWS[1:]) == 5
    assert digest(rows=[{**row, "other": row["response"]} for row in ROWS], columns={"response": "other"}) == 6
    assert digest(rows=[{**row, "other": row["response"]} for row in ROWS]) == 7
    tokenizer = (tmp_path / "model" / "tokenizer.model").read_bytes()
    (tmp_path / "model" / "tokenizer.model").write_bytes(tokenizer + b"\x1a\x04\x18\x00\x20\x00")
    assert digest() == 8
    assert digest(max_prompt_tokens=5) == 9


def test_a_file_that_was_rewritten_in_place_at_its_old_time_is_read_anew(tmp_path):
    """The same size, inode and time of the content, as a tool leaves them that restores times."""
    file = write(tmp_path / "rows.jsonl", ROWS)
    past = (file.stat().st_mtime_ns - 10**12,) * 2
    os.utime(file, ns=past)
    before = cache.digest_of_file(file, tmp_path)
    assert list((tmp_path / "files").iterdir()), "the digest is kept"
    time.sleep(0.02)  # more than a tick of the file system's clock
    with file.open("r+b") as stream:
        stream.write(file.read_bytes().replace(b'"prompt"', b'"PROMPT"'))
    os.utime(file, ns=past)
    assert cache.digest_of_file(file, tmp_path) != before


def test_writers_at_once_encode_once(place, tmp_path):
    encoder = Counting(tmp_path / "log", seconds=0.02)
    processes = [in_a_process(place, encoder) for _ in range(3)]
    digests = {process.communicate(timeout=60)[0] for process in processes}
    assert len(digests) == 1
    assert "refused" not in digests.pop()
    assert encoder.encoded() == list(range(41))
    left = sorted(path.name for path in Path(place["cache"]).iterdir())
    assert left == sorted([entries(place)[0].name, "files"]), "no lease, nothing partial"


def test_two_that_make_the_same_entry_agree_on_one(tmp_path):
    """As where a lease was taken over although its owner lives: the first to finish wins, and nothing is left."""
    made = []

    def slow(directory):
        (directory / "MANIFEST.json").write_text("slow")
        lease = json.loads((tmp_path / "key.lease").read_text())
        (tmp_path / "key.lease").write_text(json.dumps({**lease, "host": "elsewhere"}))  # and no refresh is seen
        made.append(cache.entry(tmp_path, "key", fast))

    def fast(directory):
        (directory / "MANIFEST.json").write_text("fast")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "DEAD_SECONDS", 0.3)
        assert cache.entry(tmp_path, "key", slow) == (tmp_path / "key", False)
    assert made == [(tmp_path / "key", True)]
    assert (tmp_path / "key" / "MANIFEST.json").read_text() == "fast"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key"]


def test_what_a_killed_writer_has_left_is_not_read(place, tmp_path):
    """Its process has gone, which who waits sees at once: also one who had begun to wait while it lived."""
    stuck = Counting(tmp_path / "log", stops_at=30)
    writer = in_a_process(place, stuck)
    while 30 not in stuck.encoded():
        time.sleep(0.02)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(lambda: loader(place, Counting(tmp_path / "second")).train_and_validation("sft")[0])
        time.sleep(0.5)
        assert not waiting.done()
        assert entries(place) == []
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        assert len(waiting.result(timeout=30)) == 40
    assert Counting(tmp_path / "second").encoded() == list(range(41))
    left = sorted(path.name for path in Path(place["cache"]).iterdir())
    assert left == sorted([entries(place)[0].name, "files"])


def test_a_writer_of_another_machine_that_gives_no_sign_is_taken_for_dead(place, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "DEAD_SECONDS", 0.5)
    encoder = Counting(tmp_path / "log")
    loader(place, encoder).train_and_validation("sft")
    key = entries(place)[0].name
    shutil.rmtree(entries(place)[0])
    lease = Path(place["cache"]) / f"{key}.lease"
    lease.write_text(json.dumps({"id": "theirs", "host": "elsewhere", "pid": 1}))
    start, beats = time.monotonic(), 0

    def beat():
        nonlocal beats
        while beats < 6:
            time.sleep(0.2)
            os.utime(lease)
            beats += 1

    with ThreadPoolExecutor(1) as thread:
        beating = thread.submit(beat)
        train, _, _ = loader(place, encoder).train_and_validation("sft")
        beating.result()
    assert beats == 6
    assert time.monotonic() - start > 6 * 0.2 + 0.5
    assert len(train) == 40
    assert not lease.exists()


def test_who_waits_for_a_writer_that_fails_is_told_the_same(place, tmp_path):
    """Once, by the process that found it; a later start looks again."""
    write(place["train"], [*ROWS, {"prompt": "x", "response": "refused"}])
    encoder = Counting(tmp_path / "log", seconds=0.03)
    processes = [in_a_process(place, encoder) for _ in range(3)]
    said = {process.communicate(timeout=60)[0] for process in processes}
    assert said == {f"refused: {place['train']}, line 41: this one is refused\n"}
    assert encoder.encoded() == list(range(41))
    assert entries(place) == []
    write(place["train"], ROWS)
    assert len(loader(place, encoder).train_and_validation("sft")[0]) == 40


def test_an_entry_without_a_manifest_is_made_again_once(place, tmp_path, caplog):
    """As a copy that was broken off leaves it."""
    encoder = Counting(tmp_path / "log")
    train, _, _ = loader(place, encoder).train_and_validation("sft")
    expected = list(train)
    (directory,) = entries(place)
    (directory / "MANIFEST.json").unlink()
    (directory / "more").mkdir()
    for _ in range(2):
        again, _, _ = loader(place, encoder).train_and_validation("sft")
        assert list(again) == expected
    assert encoder.encoded() == [*range(41), *range(41)]
    assert not missing_names(caplog.text, str(directory), "MANIFEST.json", "made again")
    assert sorted(path.name for path in Path(place["cache"]).iterdir()) == sorted([directory.name, "files"])
    assert not (directory / "more").exists()


def test_a_damaged_entry_is_refused(place, tmp_path):
    """One bit in any of its files; another size; a manifest that cannot be read."""
    encoder = Counting(tmp_path / "log")
    loader(place, encoder).train_and_validation("sft")
    (directory,) = entries(place)
    files = [file for file in directory.iterdir() if file.name != "MANIFEST.json"]
    assert {file.name for file in files} >= {"tokens.bin", "tokens.offsets", "stretches.bin", "_record.bin"}
    for file in files:
        whole = file.read_bytes()
        for place_of_bit in (0, len(whole) // 2, len(whole) - 1):
            raw = bytearray(whole)
            raw[place_of_bit] ^= 4
            file.write_bytes(raw)
            with refuses(file.name, "changed its content", "remove the directory"):
                loader(place, encoder).train_and_validation("sft")
        file.write_bytes(whole)
    loader(place, encoder).train_and_validation("sft")
    assert encoder.encoded() == list(range(41)), "nothing was made again"
    file = directory / "tokens.bin"
    file.write_bytes(file.read_bytes()[:-4])
    with refuses("tokens.bin", "size", "remove the directory"):
        loader(place, encoder).train_and_validation("sft")
    (directory / "MANIFEST.json").write_text("{")
    with refuses(str(directory), "not whole", "remove"):
        loader(place, encoder).train_and_validation("sft")


def test_where_the_cache_is(place, tmp_path, monkeypatch):
    run = tmp_path / "run"
    encoder = Counting(tmp_path / "log")
    loader({**place, "cache": "none"}, encoder, run).train_and_validation("sft")
    assert len(list((run / "tokens").glob("*/MANIFEST.json"))) == 1
    monkeypatch.setenv("MEGARLHF_CACHE", str(tmp_path / "by_variable"))
    assert cache.cache_directory(None, run) == tmp_path / "by_variable"
    assert cache.cache_directory("a/b", run) == Path("a/b")
    monkeypatch.delenv("MEGARLHF_CACHE")
    assert cache.cache_directory(None, run) == Path.home() / ".cache/megarlhf"
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        with refuses(str(directory), "file is a file", "data.cache", "MEGARLHF_CACHE"):
            cache.require_cache(directory)
        with refuses("data.cache", "MEGARLHF_CACHE"):
            loader({**place, "cache": str(directory)}, encoder).train_and_validation("sft")
    cache.require_cache(tmp_path / "not" / "there" / "yet")


@pytest.mark.parametrize("time_is_kept", [False, True])
def test_a_file_that_changes_while_it_is_read_is_not_kept(place, tmp_path, time_is_kept):
    class Changing(Counting):
        def _encode(self, index, record):
            if index == 20 and time_is_kept:
                before = place["train"].stat()
                write(place["train"], [{**row, "response": row["response"].upper()} for row in ROWS])
                os.utime(place["train"], ns=(before.st_atime_ns, before.st_mtime_ns))
            elif index == 20:
                os.utime(place["train"])
            return super()._encode(index, record)

    with refuses("rows.jsonl", "changed"):
        loader(place, Changing(tmp_path / "log")).train_and_validation("sft")
    assert entries(place) == []
