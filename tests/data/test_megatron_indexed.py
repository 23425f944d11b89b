"""Megatron's indexed data: what Megatron writes is read, and its GPTDataset cuts the same samples. Not covered: several
epochs, for which Megatron draws the order of the documents anew."""

import struct

import numpy as np
import pytest
import torch

from megarlhf.config.data import parse_blend
from megarlhf.data.blocks import digest_of_blocks
from megarlhf.data.samples.dataset import Joined
from megarlhf.data.samples.megatron_indexed import read_index, split_range
from tests.data.in_memory import open_indexed
from tests.refuses import refuses


def write(prefix, documents, dtype=np.int32):
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(f"{prefix}.idx")
    return prefix


def documents(count, seed=0, vocab=50):
    """Of 1 to 20 tokens; each ends with 2."""
    draw = np.random.RandomState(seed)
    return [[*draw.randint(3, vocab, size=draw.randint(0, 20)).tolist(), 2] for _ in range(count)]


@pytest.mark.parametrize("dtype", [np.int32, np.uint16])
def test_what_megatron_writes_is_read_and_the_other_way_round(tmp_path, dtype):
    """Document by document, and the same bytes where the index is written by hand."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    given = documents(30)
    prefix = write(tmp_path / "text_document", given, dtype)
    ours, theirs = read_index(prefix), IndexedDataset(str(prefix))
    assert (len(ours.lengths), ours.num_documents, ours.tokens.dtype) == (30, 30, dtype)
    for number, document in enumerate(given):
        assert ours.sequence(number).tolist() == document == theirs[number].tolist()
    assert read_index(f"{prefix}.bin").prefix == read_index(f"{prefix}.idx").prefix == prefix


@pytest.mark.parametrize("split", [None, "969,30,1", "8,1,1"])
@pytest.mark.parametrize("length", [1, 7, 16])
def test_samples_are_those_of_megatron_s_first_epoch(tmp_path, split, length):
    """Token by token, in the order in which its sample index has them; every token but the first is learnt once."""
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    class Tokenizer:
        vocab_size, eod, pad, unique_identifiers = 100, 2, -1, {}

    prefix = write(tmp_path / "text", documents(200))
    samples = open_indexed(prefix, split, length, seed=5)
    unchanged = dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), False)
    blend = {"blend": ([str(prefix)], None), "split": split or "1,0,0", "tokenizer": Tokenizer()}
    config = GPTDatasetConfig(random_seed=5, sequence_length=length, **blend, **unchanged)
    chosen = split_range(split, "train", 200)
    indices = np.arange(chosen.start, chosen.stop, dtype=np.int32)
    theirs = GPTDataset(IndexedDataset(str(prefix)), str(prefix), indices, None, Split.train, config)
    assert len(samples) == len(theirs) > 20
    place = np.argsort(theirs.shuffle_index)
    for number in range(len(samples)):
        sample, expected = samples[number], theirs[int(place[number])]
        assert sample.tokens == [*expected["tokens"].tolist(), int(expected["labels"][-1])]
        assert sample.learnt() == [False, *expected["loss_mask"].bool().tolist()]
    assert samples.lengths("tokens").tolist() == [length + 1] * len(samples)
    assert samples.digest() != open_indexed(prefix, split, length, seed=6).digest()


@pytest.mark.parametrize("blocks", [4, 512])
def test_other_tokens_of_the_same_size_are_another_data_set(tmp_path, monkeypatch, blocks):
    """A small file is read whole. Of a large one (4 blocks are made to be fewer than it has) those at even distances:
    written anew it is another one, also where it begins and ends alike; a single token between two blocks is not seen.
    A copy is the same."""
    monkeypatch.setattr("megarlhf.data.blocks.BLOCK_BYTES", 64)
    monkeypatch.setattr("megarlhf.data.blocks.BLOCKS", blocks)
    given = documents(200)
    whole = open_indexed(write(tmp_path / "text", given), None, 8, seed=1)
    assert open_indexed(write(tmp_path / "copy", given), None, 8, seed=1).digest() == whole.digest()
    turned = [given[0], *([*document[:-1][::-1], 2] for document in given[1:-1]), given[-1]]
    other = open_indexed(write(tmp_path / "other", turned), None, 8, seed=1)
    assert (len(other), other.lengths("tokens").tolist()) == (len(whole), whole.lengths("tokens").tolist())
    assert other.digest() != whole.digest()
    assert other.prompts()[0] != whole.prompts()[0]
    size = (tmp_path / "text.bin").stat().st_size
    assert size > 64 * 4 * 4
    seen = []
    for place in range(0, size, 4):
        raw = bytearray((tmp_path / "copy.bin").read_bytes())
        raw[place] ^= 1
        (tmp_path / "one.bin").write_bytes(raw)
        seen.append(digest_of_blocks(tmp_path / "one.bin") != digest_of_blocks(tmp_path / "text.bin"))
    assert (seen[0], seen[-1], all(seen)) == (True, True, blocks > 4)
    assert blocks > 4 or 64 <= sum(seen) <= 68, "four blocks of sixteen tokens"


def test_splits_and_blends_are_megatron_s():
    from megatron.core.datasets import blended_megatron_dataset_config as megatron
    from megatron.core.datasets.utils import get_blend_from_list

    for split in ("969,30,1", "99,1", "1", "0.5,0.25,0.25", "3,0,1"):
        matrix = megatron.convert_split_vector_to_split_matrix(megatron.parse_and_normalize_split(split))
        for part, borders in zip(("train", "validation", "test"), matrix, strict=True):
            if borders is None:
                with refuses("split", f"the {part} data", "1000 documents"):
                    split_range(split, part, 1000)
            else:
                expected = [round(border * 1000.0) for border in borders]
                assert split_range(split, part, 1000) == range(*expected)
    for text in ("a", "30 a 70 b", "a b", "a b c", "0.3 a"):
        prefixes, weights = get_blend_from_list(text.split())
        assert parse_blend(text) == list(zip(weights or [None] * len(prefixes), prefixes, strict=True))


def test_a_blend_of_several_is_drawn_from_by_its_weights(tmp_path):
    for name, seed in (("a", 1), ("b", 2)):
        write(tmp_path / name, documents(50, seed))
    blend = open_indexed(f"30 {tmp_path}/a 70 {tmp_path}/b", None, 8, seed=1)
    assert isinstance(blend, Joined)
    assert blend.weights == [30.0, 70.0]
    assert [len(part) for part in blend.parts] == [len(open_indexed(tmp_path / name, None, 8, 1)) for name in "ab"]
    assert open_indexed([f"{tmp_path}/a", f"{tmp_path}/b"], None, 8, 1).weights is None


def damage(path, **changed):
    raw = bytearray(path.read_bytes())
    for at, value in changed.values():
        raw[at : at + len(value)] = value
    path.write_bytes(bytes(raw))


BROKEN = [
    ("no index", lambda d: (d / "text.idx").unlink(), "text.idx"),
    ("a misspelt prefix", lambda d: (d / "text.idx").rename(d / "texts.idx"), "text.idx|texts"),
    ("another file", lambda d: (d / "text.idx").write_bytes(b"PK" + bytes(40)), "no index|begins with b'PK"),
    ("an empty index", lambda d: (d / "text.idx").write_bytes(b""), "no index|b''"),
    ("another dtype", lambda d: damage(d / "text.idx", dtype=(17, b"\x07")), "version 1|dtype 7"),
    ("another version", lambda d: damage(d / "text.idx", version=(9, struct.pack("<Q", 2))), "version 2"),
    ("a cut index", lambda d: (d / "text.idx").write_bytes((d / "text.idx").read_bytes()[:-8]), "text.idx|bytes|cut"),
    ("cut tokens", lambda d: (d / "text.bin").write_bytes((d / "text.bin").read_bytes()[:-4]), "text.bin|index says"),
]  # fmt: skip


@pytest.mark.parametrize("name, harm, names", BROKEN, ids=[case[0] for case in BROKEN])
def test_files_that_are_not_whole_are_refused(tmp_path, name, harm, names):
    prefix = write(tmp_path / "text", documents(5))
    harm(tmp_path)
    with refuses(*names.split("|")):
        open_indexed(prefix, None, 4, 0)


def test_what_cannot_be_meant_is_refused(tmp_path):
    prefix = write(tmp_path / "text", documents(5))
    for split in ("a,b", "", "1,2,3,4", "-1,2", "0,0,0"):
        with refuses("training", "validation", "test"):
            split_range(split, "train", 10)
    with refuses("weight above 0", "prefix"):
        parse_blend("0 a 70 b")
    with refuses("5000 + 1", "data.sequence_length"):
        open_indexed(prefix, None, 5000, 0)
