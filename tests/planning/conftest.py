"""What the configurations in configs.py name."""

import json

import pytest

from tests.planning.configs import MODEL
from tools.demo.make_data import train_tokenizer


@pytest.fixture
def paths(tmp_path):
    """A model's configuration, and data that exists (its content is not read here)."""

    def model(name, **changes):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps({**MODEL, **changes}))
        (directory / "tokenizer.model").write_bytes(train_tokenizer())
        return directory

    for name in ("train", "validation"):
        (tmp_path / f"{name}.jsonl").write_text("{}\n")
    return {"model": model("model"), "make": model, "train": tmp_path / "train.jsonl", "root": tmp_path}
