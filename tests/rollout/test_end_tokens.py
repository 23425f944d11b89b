"""Where a response ends: both engines take the same tokens from the model's directory.

Not covered: that vLLM heeds what it is asked for (tests/distributed/test_vllm.py).
"""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megarlhf.config import RoleConfig, RolloutConfig
from megarlhf.data.tokenizers.tokenizer import load_tokenizer
from megarlhf.model_directory import end_tokens
from megarlhf.rollout.balance import SeenLengths
from megarlhf.rollout.factory import sampling_of
from megarlhf.rollout.megatron_engine import _Decoding
from megarlhf.rollout.prompt_queue import SharedCounter
from megarlhf.rollout.responses import ResponsePart, Sampling
from megarlhf.rollout.vllm import engine as vllm_engine
from megarlhf.runtime import Runtime
from tests.rollout.test_generate_loop import flat
from tests.tables import make_response
from tools.demo.make_data import base_files


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [5, 2, 7]}, {"eos_token_id": 9}, (2, 5, 7)),
        ({"eos_token_id": 5}, {}, (2, 5)),
        ({}, {"eos_token_id": 9}, (2,)),
        (None, {"eos_token_id": 9}, (2, 9)),
        (None, {"eos_token_id": None}, (2,)),
        (None, None, (2,)),
    ],
)
def test_the_tokenizer_s_token_and_those_of_the_generation_config(tmp_path, generation, config, expected):
    """config.json counts only where there is no generation_config.json, as in transformers."""
    for name, tree in (("generation_config.json", generation), ("config.json", config)):
        if tree is not None:
            (tmp_path / name).write_text(json.dumps(tree))
    assert end_tokens(tmp_path, 2) == expected


@pytest.mark.parametrize("text", ["{", "[5]", '{"eos_token_id": "</s>"}', '{"eos_token_id": [5, true]}'])
def test_a_file_that_names_no_tokens_is_refused(tmp_path, text):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"generation_config\.json.*(copy the file again|correct the file)"):
        end_tokens(tmp_path, 2)


@pytest.fixture
def sampling(tmp_path):
    """Of a configured run, whose model also ends at 9; its tokenizer says 2."""
    for name, content in base_files().items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9]}')
    actor = RoleConfig.model_validate({"model": {"path": tmp_path}})
    made = sampling_of(RolloutConfig(max_response_tokens=3), actor, load_tokenizer(tmp_path))
    assert made == Sampling(max_tokens=3, temperature=1.0, greedy=False, end_ids=(2, 9))
    return made


def test_the_megatron_engine_ends_at_each_of_them(sampling):
    """Rows end at 2, at 9, and not at all."""
    rows = _Decoding([0, 1, 2], [torch.tensor([1])] * 3, [ResponsePart((), 3)] * 3, 4, torch.device("cpu"))
    for tokens in ((5, 9, 5), (2, 5, 5), (5, 5, 5)):
        rows.extend(torch.tensor([[token, -0.5] for token in tokens], dtype=torch.float64), sampling)
    assert rows.ended(4) == {
        0: make_response([5, 2], [-0.5] * 2, True, 4),
        1: make_response([9], [-0.5], True, 4),
        2: make_response([5, 5, 5], [-0.5] * 3, False, 4),
    }


def test_vllm_is_asked_to_end_at_exactly_these(sampling, monkeypatch, one_rank):
    """`ignore_eos` is about what vLLM reads from the directory by itself, not about `stop_token_ids`."""
    asked = []

    def gathered(mine):
        return SimpleNamespace(
            mine=mine,
            responses=SimpleNamespace(lengths_N=torch.tensor([1])),
            finished_N=torch.tensor([True]),
            dialogues=(),
        )

    class Engine:
        def enqueue(self, requests, parameters, use_tqdm, lora_request=None):
            asked.extend(parameters)
            self.unfinished = len(requests)
            return ["0-a"]

        def get_num_unfinished_requests(self):
            return self.unfinished

        def step(self):
            self.unfinished = 0
            output = SimpleNamespace(token_ids=[9], logprobs=flat([9]), finish_reason="stop")
            return [SimpleNamespace(outputs=[output], finished=True, request_id="0")]

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=lambda **options: options))
    monkeypatch.setattr(vllm_engine, "gather_rollouts", lambda mine, *_, **__: gathered(mine))
    engine = vllm_engine.VllmEngine.__new__(vllm_engine.VllmEngine)
    engine._refusal, engine._tp, engine._version, engine._max_model_len = "", 1, 0, 4
    engine._runtime = Runtime(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"), backend="gloo")
    engine._wake, engine._counter, engine._seen = lambda **_: None, SharedCounter(dist.HashStore, "n"), SeenLengths()
    engine._llm, engine._rollout = Engine(), RolloutConfig()
    engine._llm.llm_engine = engine._llm
    assert engine.generate([torch.tensor([1])], [3], sampling).mine == {0: make_response([9], [-0.5], True)}
    (parameters,) = asked
    assert (parameters["stop_token_ids"], parameters["ignore_eos"], parameters["seed"]) == ([2, 9], True, 3)
    with pytest.raises(ValueError, match=r"a prompt of 2 tokens and a response of up to 3 .* the 4 tokens"):
        engine.generate([torch.tensor([1, 1])], [3], sampling)
