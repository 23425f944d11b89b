"""vLLM, for sessions that have a test which needs it. Its environment has to be set before."""

# ruff: noqa: E402, F401
import gc
from types import SimpleNamespace
from typing import Any

import torch

from megarlhf.config import RolloutConfig
from megarlhf.rollout.vllm.build import set_environment

runtime: Any = SimpleNamespace(device=torch.device("cpu"))
set_environment(RolloutConfig(), runtime)

import vllm.model_executor.models.llama
import vllm.model_executor.models.mixtral
import vllm.v1.attention.backends.cpu_attn
import vllm.v1.engine.llm_engine
import vllm.v1.executor.uniproc_executor
import vllm.v1.worker.cpu_model_runner
import vllm.v1.worker.cpu_worker
from vllm import LLM, SamplingParams
from vllm.model_executor.models import registry
from vllm.platforms import cpu, current_platform
from vllm.v1.engine import core

# The cache of 1 GiB, the least that can be configured, is filled with zeros on each rank of each engine: 2 CPU seconds
# of page faults. The tiny models need a few MiB.
assert cpu.GiB_bytes == 1 << 30
cpu.GiB_bytes = 128 << 20

# Each engine looks through all modules for kernels of Triton's that have a substitute on a CPU, and takes those that
# the one before has put there for the kernels.
current_platform.register_triton_kernel_overrides()
current_platform.register_triton_kernel_overrides = lambda: None

# vLLM looks at a class of models in a process of its own, lest CUDA be started here, and remembers the result in the
# user's home: ten seconds on each rank for each class on a machine that is new to the tests.
lazy = registry._LazyRegisteredModel
lazy.inspect_model_cls = lambda model: registry._ModelInfo.from_model_cls(model.load_model_cls())

# An engine that starts freezes all objects, its own among them, and one that ends thaws them: the collector then goes
# through what is imported, a second on each rank every time, and copies its memory. Frozen stays what is so here.
core.freeze_gc_heap = gc.collect
gc.unfreeze = lambda: None

gc.collect()
gc.freeze()
