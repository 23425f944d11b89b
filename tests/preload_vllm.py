"""vLLM, for sessions that have a test which needs it. Its environment has to be set before."""

# ruff: noqa: E402, F401
import gc
from types import SimpleNamespace
from typing import Any

import torch

from megarlhf.config import RolloutConfig
from megarlhf.rollout import vllm_engine

runtime: Any = SimpleNamespace(device=torch.device("cpu"))
vllm_engine._set_environment(RolloutConfig(), runtime)

import vllm.model_executor.models.llama
import vllm.model_executor.models.mixtral
import vllm.v1.attention.backends.cpu_attn
import vllm.v1.engine.llm_engine
import vllm.v1.executor.uniproc_executor
import vllm.v1.worker.cpu_model_runner
import vllm.v1.worker.cpu_worker
from vllm import LLM, SamplingParams
from vllm.platforms import cpu

# The cache of 1 GiB, the least that can be configured, is filled with zeros on each rank of each engine: 2 CPU seconds
# of page faults. The tiny models need a few MiB.
assert cpu.GiB_bytes == 1 << 30
cpu.GiB_bytes = 128 << 20

gc.collect()
gc.freeze()
