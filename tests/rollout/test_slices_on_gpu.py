"""What a GPU promises for slices: vLLM's noise is a function of seed and absolute position.

Not covered: logits, which on a GPU depend on the batch by rounding.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from megarlhf.config import RolloutConfig
from megarlhf.rollout.vllm.build import require_runner
from tests.refuses import refuses


def test_vllm_s_noise_follows_from_seed_and_position_alone():
    """By its own kernel: other batches and other slots give the same tokens, another seed or position others."""
    environment = os.environ | {"TRITON_INTERPRET": "0" if torch.cuda.is_available() else "1", "OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name("vllm_noise.py")
    made = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=200)
    assert made.returncode == 0, made.stderr
    drawn = json.loads(made.stdout.splitlines()[-1])
    assert drawn["parts"] == drawn["whole"]
    for name in ("other", "later"):
        assert sum(a == b for a, b in zip(drawn[name], drawn["whole"], strict=True)) < 4


def test_the_older_runner_of_vllm_is_refused_with_slices():
    """Its generators know nothing of earlier parts of a response."""
    old, new = (
        SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=SimpleNamespace(use_v2_model_runner=v2)))
        for v2 in (False, True)
    )
    for llm, rollout in ((new, RolloutConfig(slices=2)), (old, RolloutConfig()), (old, RolloutConfig(steps_ahead=1))):
        require_runner(llm, rollout)
    with refuses("rollout.slices = 2", "model runner V2"):
        require_runner(old, RolloutConfig(slices=2))
