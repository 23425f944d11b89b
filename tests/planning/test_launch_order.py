"""The order of messages and products on a GPU is asked for where it matters. Not covered: a GPU."""

from __future__ import annotations

import pytest

from megarlhf.config import RoleConfig
from megarlhf.planning.launch_order import launch_order

Roles = dict[str, RoleConfig]


def roles(tp: int) -> Roles:
    return {"actor": RoleConfig.model_validate({"model": {"path": "models/base"}, "parallel": {"tp": tp}})}


@pytest.mark.parametrize(
    ("tp", "environ", "on_gpu", "expected"),
    [
        (2, {}, True, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        (1, {}, True, {}),
        (2, {}, False, {}),
        (2, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, True, {}),
    ],
)
def test_one_queue_with_tensor_parallelism(
    tp: int, environ: dict[str, str], on_gpu: bool, expected: dict[str, str]
) -> None:
    assert launch_order(roles(tp), environ, on_gpu=on_gpu) == expected
