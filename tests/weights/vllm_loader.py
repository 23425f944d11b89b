"""What vLLM's own model classes hold after their own loaders read a checkpoint. `python -m tests.weights.vllm_loader TP
TP_RANK PORT DIRECTORY...`: for each Hugging Face directory writes DIRECTORY/vllm-TP-TP_RANK.pt, {name: tensor} of
`named_parameters()`. Models are made and loaded, not prepared for running (on a CPU, vLLM repacks weights after
loading). The first directory has experts, if any has. A process of its own, since vLLM's state is global."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def main(tp: int, tp_rank: int, port: int, directories: list[Path]) -> None:
    import torch
    from safetensors.torch import load_file
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        LoadConfig,
        ModelConfig,
        ParallelConfig,
        VllmConfig,
        set_current_vllm_config,
    )
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.model_loader.utils import initialize_model

    started = False
    for directory in directories:
        config = VllmConfig(
            model_config=ModelConfig(
                model=str(directory), dtype="float32", skip_tokenizer_init=True, enforce_eager=True
            ),
            parallel_config=ParallelConfig(tensor_parallel_size=tp, distributed_executor_backend="external_launcher"),
            cache_config=CacheConfig(),
            load_config=LoadConfig(),
            device_config=DeviceConfig(device="cpu"),
        )
        with set_current_vllm_config(config):
            if not started:
                where = f"tcp://127.0.0.1:{port}"
                init_distributed_environment(tp, tp_rank, where, tp_rank, backend="gloo")
                initialize_model_parallel(tp)
                started = True
            model = initialize_model(config).float()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(-1.0)  # what no loader fills is padding
            model.load_weights(iter(load_file(directory / "model.safetensors").items()))
        parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        torch.save(parameters, directory / f"vllm-{tp}-{tp_rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), [Path(name) for name in sys.argv[4:]])
