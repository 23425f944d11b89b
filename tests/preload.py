"""What rank processes need, imported once by the server that they are forked from: torch, Megatron-Core, transformers.

Nothing here may start a thread or join a process group: neither survives a fork.
"""

# ruff: noqa: E402, F401
import gc

from megarlhf.commands.launch import silence_libraries

silence_libraries()

import megatron.core.models.gpt.gpt_layer_specs
from megatron.core import dist_checkpointing
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import megarlhf.commands.cli
import megarlhf.planning.preflight
import megarlhf.trainers.rl.loop
import megarlhf.trainers.supervised.rm
import megarlhf.trainers.supervised.sft
import tests.distributed.jobs

gc.collect()
gc.freeze()  # the collector would otherwise write to, and so copy, every page that ranks share
