"""vLLM, for sessions that have a test which needs it. Its environment has to be set before."""

# ruff: noqa: E402, F401
from types import SimpleNamespace
from typing import Any

import torch

from megarlhf.config import RolloutConfig
from megarlhf.rollout import vllm_engine

runtime: Any = SimpleNamespace(device=torch.device("cpu"))
vllm_engine._set_environment(RolloutConfig(), runtime)

import vllm.v1.worker.cpu_worker
from vllm import LLM, SamplingParams
