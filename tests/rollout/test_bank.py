"""The rollout bank in a process of one rank: what is used again, what is not, and what a full disk does.

Not covered here: several ranks (tests/distributed/test_rollout_resume.py).
"""

import errno
import json
import logging
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from megarlhf.rollout import bank as bank_module
from megarlhf.rollout.bank import RolloutBank
from megarlhf.rollout.bank_lines import line_of
from megarlhf.rollout.responses import Response, Sampling
from tests.tables import make_response

SAMPLING = Sampling(max_tokens=3, temperature=0.7, end_ids=(2, 9))
PROMPTS = [torch.tensor([1, n]) for n in range(4)]
SEEDS = [2**61 + n for n in range(4)]
# Log-probs as an engine returns them: fp32 values, some without a short decimal form.
ROWS = {
    0: make_response([5, 2], [float(np.float32(-0.1)), float(np.float32(-1e-30))], True, 7),
    1: make_response([2**31 - 1, 7, 7], [-0.5, float(np.float32(-np.pi)), 0.0], False, 7),
    2: make_response([9], [float(np.float32(-1 / 3))], True, 7),
}


@pytest.fixture
def opened(one_rank, tmp_path):
    def open_bank(step=7, fingerprint="weights 7", sampling=SAMPLING, prompts=PROMPTS, seeds=SEEDS, refill=0):
        return RolloutBank(tmp_path / "bank").open(
            step, fingerprint=fingerprint, sampling=sampling, prompts=prompts, seeds=seeds, refill=refill
        )

    return open_bank


def put(opened, rows):
    with opened() as kept:
        for row in rows:
            kept.add(row, ROWS[row])
        assert kept.held.keys() >= set(rows)


def test_responses_come_back_bit_for_bit_after_any_number_of_openings(opened):
    put(opened, [2])
    put(opened, [0, 1])
    again = opened()
    assert again.held == ROWS
    assert again.num_taken_over == 3
    assert opened(step=8).held == {}


def test_nothing_is_lost_when_the_process_is_killed(tmp_path):
    """The responses are with the operating system when `add` returns: no close, no flush, no exit handler."""
    program = f"""
import os, pathlib, signal, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
from tests.rollout.test_bank import *
kept = RolloutBank(pathlib.Path({str(tmp_path / "bank")!r})).open(
    7, fingerprint="weights 7", sampling=SAMPLING, prompts=PROMPTS, seeds=SEEDS)
for row, response in ROWS.items():
    kept.add(row, response)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == -9
    (path,) = (tmp_path / "bank/step_000007").iterdir()
    assert len(path.read_bytes().splitlines()) == 1 + len(ROWS)


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_torn_line_is_dropped_and_said_and_the_others_stay(opened, tmp_path, caplog, cut):
    put(opened, [0, 1])
    (path,) = (tmp_path / "bank/step_000007").iterdir()
    content = path.read_bytes()
    last = content.splitlines(keepends=True)[-1]
    path.write_bytes(content[: -max(2, cut * len(last) // 12)])
    assert opened().held == {0: ROWS[0]}
    assert "1 torn or corrupt lines" in caplog.text
    put(opened, [1])
    assert opened().held == {0: ROWS[0], 1: ROWS[1]}


def test_every_flipped_bit_is_found(opened, tmp_path):
    """In the record of a row: the row is dropped, or (a bit of the line's end) its text is the same."""
    put(opened, [0, 2])
    (path,) = (tmp_path / "bank/step_000007").iterdir()
    content = path.read_bytes()
    lines = content.splitlines(keepends=True)
    start, found = len(lines[0]), 0
    for place in range(start, start + len(lines[1]) - 1):
        changed = bytearray(content)
        changed[place] ^= 1 << (place % 7)
        path.write_bytes(bytes(changed))
        held = opened().held
        assert held in ({2: ROWS[2]}, {0: ROWS[0], 2: ROWS[2]})
        found += 0 not in held
    assert found > 0.9 * len(lines[1])


@pytest.mark.parametrize(
    "change, words",
    [
        ({"fingerprint": "weights 8"}, "fingerprint = weights 7, now weights 8"),
        ({"sampling": replace(SAMPLING, temperature=1.0)}, "sampling = "),
        ({"sampling": replace(SAMPLING, end_ids=(2,))}, "sampling = "),
        ({"prompts": PROMPTS[:3], "seeds": SEEDS[:3]}, "num_samples = 4, now 3"),
    ],
)
def test_responses_drawn_with_something_else_are_put_aside(opened, tmp_path, caplog, change, words):
    put(opened, [0, 1])
    assert opened(**change).held == {}
    assert words in caplog.text
    (path,) = (tmp_path / "bank/step_000007").iterdir()
    assert path.name.endswith(".jsonl.unusable")
    caplog.clear()
    assert opened(**change).held == {}
    assert not caplog.records, "said twice"


@pytest.mark.parametrize(
    "change",
    [{"prompts": [torch.tensor([1, 0, 0]), *PROMPTS[1:]]}, {"seeds": [SEEDS[0] + 1, *SEEDS[1:]]}],
)
def test_a_row_of_another_prompt_or_seed_is_drawn_again(opened, caplog, change):
    put(opened, [0, 1])
    assert opened(**change).held == {1: ROWS[1]}
    assert "1 rows of another prompt, seed or slice" in caplog.text


def test_a_bank_of_format_1_is_of_the_steps_own_version(opened, tmp_path):
    """Its records have no versions. What is added has them, and both are used together."""
    put(opened, [0, 1])
    (path,) = (tmp_path / "bank/step_000007").iterdir()
    header, *records = (json.loads(line)["record"] for line in path.read_text().splitlines())
    assert [record.pop("versions") for record in records] == [[[7, 2]], [[7, 3]]]
    path.write_bytes(b"".join(map(line_of, [header | {"format": 1}, *records])))
    with opened() as kept:
        assert kept.held == {0: ROWS[0], 1: ROWS[1]}
        kept.add(2, replace(ROWS[2], versions=((6, 1),)))
    held = opened().held
    assert [held[row].versions for row in range(3)] == [((7, 2),), ((7, 3),), ((6, 1),)]
    path.write_bytes(line_of(header | {"format": 3}))
    assert sorted(opened().held) == [2]


def test_a_corrupt_header_makes_the_file_unusable(opened, tmp_path, caplog):
    put(opened, [0])
    (path,) = (tmp_path / "bank/step_000007").iterdir()
    path.write_bytes(b"x" + path.read_bytes())
    assert opened().held == {}
    assert "its first line is torn or corrupt" in caplog.text


def test_of_a_doubled_row_the_first_counts(opened, caplog):
    put(opened, [0])
    with opened() as kept:
        kept.add(0, make_response([7, 7, 7], [-1.0] * 3, False))
    assert opened().held == {0: ROWS[0]}
    assert "1 doubled rows" in caplog.text


@pytest.mark.parametrize(
    "tokens, num_logprobs, finished, of_version",
    [
        ([5], 1, False, 1),
        ([5, 2], 2, False, 2),
        ([5, 5, 5], 3, True, 3),
        ([], 0, True, 0),
        ([5, 2], 1, True, 2),
        ([5, 2], 2, True, 1),
    ],
)
def test_what_is_no_finished_response_is_not_used(opened, caplog, tokens, num_logprobs, finished, of_version):
    """Its checksum is right. The first one has neither ended nor full length."""
    with opened() as kept:
        kept.add(0, Response(tokens, [-1.0] * num_logprobs, finished, ((7, of_version),)))
        kept.add(1, ROWS[1])
    assert opened().held == {1: ROWS[1]}
    assert "1 rows that are no finished response" in caplog.text


@pytest.mark.parametrize("call", ["write", "fsync", "open"])
def test_a_full_disk_is_said_once_and_the_rollout_goes_on(opened, tmp_path, caplog, monkeypatch, call):
    put(opened, [0])
    bank = RolloutBank(tmp_path / "bank")
    real, failed = getattr(os, call), []

    def full(*arguments):
        if call == "write" and not failed:
            real(arguments[0], arguments[1][:20])  # a part of the line is still written
        failed.append(call)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(bank_module.os, call, full)
    for _ in range(2):
        with bank.open(7, fingerprint="weights 7", sampling=SAMPLING, prompts=PROMPTS, seeds=SEEDS) as kept:
            for row in (1, 2):
                kept.add(row, ROWS[row])
            assert kept.held == ROWS
    monkeypatch.undo()
    assert failed
    (warning,) = [record.getMessage() for record in caplog.records if "is not kept" in record.getMessage()]
    assert "No space left" in warning
    assert opened().held[0] == ROWS[0]


def test_fsync_is_rare_and_comes_at_the_end(opened, monkeypatch):
    calls, clock = [], [100.0]
    monkeypatch.setattr(bank_module.time, "monotonic", lambda: clock[0])
    with opened() as kept:
        kept.add(0, ROWS[0])  # makes the file: its folders are synchronised too
        monkeypatch.setattr(bank_module.os, "fsync", lambda file: calls.append(clock[0]))
        kept.add(1, ROWS[1])
        assert calls == []
        clock[0] += 1.5
        kept.add(2, ROWS[2])
        assert calls == [101.5]
    assert calls == [101.5, 101.5]


def test_the_banks_of_consumed_steps_are_removed_and_nothing_else(opened, tmp_path):
    for step in (5, 6, 7, 123):
        with opened(step=step) as kept:
            kept.add(0, ROWS[0])
    (tmp_path / "bank" / "step_000001.old").mkdir()
    RolloutBank(tmp_path / "bank").forget_before(7)
    left = sorted(path.name for path in (tmp_path / "bank").iterdir())
    assert left == ["step_000001.old", "step_000007", "step_000123"]
    assert opened().held == {0: ROWS[0]}
    RolloutBank(tmp_path / "none").forget_before(7)


def test_a_round_of_dynamic_sampling_has_a_bank_of_its_own(opened, tmp_path):
    put(opened, [0])
    with opened(refill=2) as kept:
        assert kept.held == {}
        kept.add(1, ROWS[1])
    assert opened().held == {0: ROWS[0]}
    assert opened(refill=2).held == {1: ROWS[1]}
    RolloutBank(tmp_path / "bank").forget_before(8)
    assert list((tmp_path / "bank").iterdir()) == []


def test_the_header_names_what_the_responses_were_drawn_with(opened, tmp_path):
    put(opened, [0])
    (path,) = (tmp_path / "bank/step_000007").iterdir()
    assert path.name == "0001_rank_00000.jsonl"
    header = json.loads(path.read_text().splitlines()[0])["record"]
    assert header == {
        "format": 2,
        "step": 7,
        "fingerprint": "weights 7",
        "sampling": {"max_tokens": 3, "temperature": 0.7, "greedy": False, "end_ids": [2, 9]},
        "num_samples": 4,
    }


def test_a_first_opening_says_nothing(opened, caplog):
    caplog.set_level(logging.INFO)
    opened()
    assert not caplog.records
