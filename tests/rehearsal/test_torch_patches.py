"""What a rehearsal uses of torch's inside is where it was, and does what it did.

A failure here means: torch has moved something; look at `megarlhf/rehearsal/fake_device/torch_patches.py` before
`TESTED` is changed.
"""

import importlib.util
import inspect
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megarlhf.rehearsal.fake_device import torch_patches
from tests.refuses import refuses
from tests.rehearsal.devices import a_device, unknown


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_another_torch_is_refused_with_both_versions(monkeypatch) -> None:
    torch_patches.require_tested_torch()
    for version in ("2.12.1", "2.14.0+cu130", "2.130.0"):
        monkeypatch.setattr(torch, "__version__", version)
        with refuses("2.13", version, "fake_device/torch_patches.py", error=RuntimeError):
            torch_patches.require_tested_torch()


def test_private_interfaces_are_where_they_were() -> None:
    """Names and arguments that interfaces.py hands on."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import _create_fake_pg
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    assert "allow_non_fake_inputs" in parameters(FakeTensorMode)
    assert parameters(_create_fake_pg) == ["common_opts", "backend_opts"]
    assert parameters(_setup_privateuseone_for_python_backend)[:2] == ["rename", "backend_module"]
    assert callable(torch._C._get_privateuse1_backend_name)
    memory = torch.zeros(2)
    assert torch_patches.storage_key(memory) == torch_patches.storage_key(memory[1:]) == memory.untyped_storage()._cdata
    assert torch_patches.storage_key(memory) != torch_patches.storage_key(memory.clone())
    assert torch_patches.tree_flatten([{"a": (1, 2)}])[0] == [1, 2]
    assert callable(dist.Work.boxed)
    assert parameters(dist.broadcast_object_list)[:2] == ["object_list", "src"]
    lists = ["scatter_object_output_list", "scatter_object_input_list"]
    assert parameters(dist.scatter_object_list)[:3] == [*lists, "src"]
    assert parameters(dist.all_reduce)[:2] == ["tensor", "op"]
    module = nn.Linear(2, 2)
    assert set(module._parameters) == {"weight", "bias"}
    assert module._buffers == {}


PRIVATE = re.compile(r"torch\._(?!_)|torch\.[\w.]+\._|\._cdata|torch\.testing\._internal")


def test_no_other_file_of_a_rehearsal_names_what_is_private_to_torch() -> None:
    folder = Path(torch_patches.__file__).parents[1]
    private = {file.name for file in folder.rglob("*.py") if PRIVATE.search(file.read_text(encoding="utf-8"))}
    assert private == {"torch_patches.py"}


def test_triton_launches_a_kernel_through_run() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    from triton.runtime.jit import JITFunction

    assert {"grid", "warmup"} <= set(parameters(JITFunction.run))


def test_only_tensors_of_the_host_are_lifted_as_they_are() -> None:
    with torch_patches.lifting_only_host_tensors():
        assert torch._C._only_lift_cpu_tensors() is True
    assert torch._C._only_lift_cpu_tensors() is False


def test_a_fake_tensor_beside_a_real_one() -> None:
    """What every line of the rehearsal relies on: shapes without numbers, real tensors that stay real."""
    with a_device() as device:
        product = unknown(3, 4) @ unknown(4, 5)
        assert isinstance(product, torch_patches.FakeTensor)
        assert (tuple(product.shape), product.device) == ((3, 5), torch.device("cpu", 0))
        real = torch.tensor([1, 2])
        assert not isinstance(real, torch_patches.FakeTensor)
        assert device.ledger.total == 4 * 15
        del product
        assert device.ledger.total == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_on_the_way_of_a_cpu_is_the_kernel_of_a_cpu(dtype) -> None:
    """No [S, S]: of 4 heads and 512 positions it would be 1M elements; saved are the output and a row of sums."""
    with a_device() as device:
        query = unknown(1, 4, 512, 32, dtype=dtype).requires_grad_()
        before = device.ledger.total
        out = nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
        assert "FlashAttentionForCpu" in type(out.grad_fn).__name__
        kept = device.ledger.total - before
        assert kept == 4 * 512 * (32 * dtype.itemsize + 4)
