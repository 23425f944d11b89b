"""What a start says of its data: two splits of one directory are told apart.

Not covered: what is skipped and why (tests/data/test_samples.py).
"""

import json

from megarlhf.config import PromptDataConfig, SFTConfig
from megarlhf.trainers.prompts import load_prompts
from megarlhf.trainers.sft import SupervisedFineTuning
from megarlhf.trainers.supervised import load_samples
from tests.planning.configs import MODEL
from tools.demo.make_data import train_tokenizer


def test_the_notes_name_the_split(tmp_path):
    """Two training records, one held out."""
    model, data = tmp_path / "model", tmp_path / "data"
    for folder in (model, data):
        folder.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL))
    (model / "tokenizer.model").write_bytes(train_tokenizer())
    for split, count in (("train", 2), ("test", 1)):
        (data / f"{split}.jsonl").write_text(json.dumps({"prompt": "1+1=", "response": "2"}) + "\n")
        (data / f"{split}.jsonl").write_text((data / f"{split}.jsonl").read_text() * count)
    section = {"train": data, "train_split": "train", "heldout": data, "heldout_split": "test"}
    expected = [f"{data}, split train: used all 2 records", f"{data}, split test: used all 1 records"]
    assert load_prompts(PromptDataConfig.model_validate(section), model).notes == expected
    cfg = SFTConfig.model_validate(
        {
            "run": {"dir": tmp_path / "run"},
            "actor": {"model": {"path": model, "random_init": True}},
            "data": {**section, "max_prompt_tokens": 20, "max_response_tokens": 20},
            "train": {"num_steps": 1, "mini_batch_samples": 1, "micro_batch_samples": 1},
        }
    )
    assert load_samples(SupervisedFineTuning(cfg))[2] == expected
    whole = PromptDataConfig(train=data / "train.jsonl")
    assert load_prompts(whole, model).notes == [f"{data / 'train.jsonl'}: used all 2 records"]
