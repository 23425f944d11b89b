"""What the configurations in configs.py name."""

import json

import pytest

from tests.planning.configs import MODEL, ROWS
from tools.demo.make_data import train_tokenizer


@pytest.fixture
def paths(tmp_path):
    """A model's configuration, and data for every command, of which no more than the first rows are read."""

    def model(name, **changes):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps({**MODEL, **changes}))
        (directory / "tokenizer.model").write_bytes(train_tokenizer())
        return directory

    for name in ("train", "validation"):
        (tmp_path / f"{name}.jsonl").write_text(ROWS)
    return {"model": model("model"), "make": model, "train": tmp_path / "train.jsonl", "root": tmp_path}
