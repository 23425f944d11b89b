"""Parts of roles go to host memory and come back: bits, views, and what is counted.

Not covered here: whole steps under each policy (tests/distributed/test_memory_by_phase.py), pinned memory and streams.
"""

import torch

from megarlhf.config import OffloadConfig
from megarlhf.parallel.device_memory import DeviceMemory, HostMemory, RoleParts, Tensors

CPU = torch.device("cpu")


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.view(torch.int32).tolist()


def test_a_part_comes_back_to_the_bit_under_every_view_of_it() -> None:
    whole = torch.randn(64)
    whole[3] = float("nan")
    view, other = whole[8:24].view(4, 4), torch.randn(5)
    before = bits(whole), bits(view), bits(other)
    host = HostMemory(CPU)
    part = Tensors(lambda: [view, whole, other], host)
    assert part.nbytes == 4 * (64 + 5)
    part.offload()
    assert whole.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    assert (host.nbytes, part.nbytes, part.present) == (4 * 69, 4 * 69, False)
    part.onload()
    part.wait()
    assert (bits(whole), bits(view), bits(other)) == before
    view.fill_(2.0)
    assert whole[8:24].tolist() == [2.0] * 16
    part.offload()
    assert host.nbytes == 4 * 69, "the same host memory again"
    part.onload()
    assert view.flatten().tolist() == [2.0] * 16, "what has changed since is copied"


def test_what_is_not_copied_takes_no_host_memory() -> None:
    gradients, host = torch.ones(1000), HostMemory(CPU)
    part = Tensors(lambda: [gradients], host, copied=False)
    part.offload()
    part.onload()
    assert (gradients.untyped_storage().nbytes(), host.nbytes) == (4000, 0)


def test_what_is_constant_is_copied_to_the_host_once(monkeypatch) -> None:
    weights, host = torch.ones(10), HostMemory(CPU)
    fills = []
    fill = host.fill
    monkeypatch.setattr(host, "fill", lambda *args: (fills.append(1), fill(*args)))
    part = Tensors(lambda: [weights], host, constant=True)
    for _ in range(3):
        part.offload()
        part.onload()
    assert len(fills) == 1
    part.may_change()
    weights.fill_(3.0)
    part.offload()
    part.onload()
    assert (len(fills), weights.tolist()) == (2, [3.0] * 10)


def test_what_is_made_later_leaves_too_and_what_others_hold_stays() -> None:
    parameter, moments = torch.ones(4), [torch.ones(4)]
    part = Tensors(lambda: [parameter, *moments], HostMemory(CPU), without=lambda: [parameter])
    part.offload()
    part.onload()
    moments.append(torch.full((8,), 2.0))
    part.offload()
    assert (parameter.tolist(), [m.untyped_storage().nbytes() for m in moments]) == ([1.0] * 4, [0, 0])
    part.onload()
    assert moments[1].tolist() == [2.0] * 8


def role(device_memory: DeviceMemory, **offload: bool | str) -> tuple[RoleParts, list[torch.Tensor]]:
    tensors = [torch.full((4,), float(number)) for number in range(3)]
    parts = RoleParts(
        device_memory,
        Tensors(lambda: tensors[:1], device_memory.host),
        Tensors(lambda: tensors[1:2], device_memory.host, copied=False),
        (Tensors(lambda: tensors[2:], device_memory.host),),
    )
    device_memory.share(parts, OffloadConfig.model_validate(offload))
    return parts, tensors


def there(tensors: list[torch.Tensor]) -> list[bool]:
    return [tensor.untyped_storage().nbytes() > 0 for tensor in tensors]


def test_each_turn_has_what_it_needs_and_the_others_have_left() -> None:
    device_memory = DeviceMemory(CPU)
    actor, of_actor = role(device_memory, parameters=True, optimizer=True)
    critic, of_critic = role(device_memory, parameters=True, optimizer=True)
    actor.to_compute()
    assert (there(of_actor), there(of_critic)) == ([True, False, False], [False] * 3)
    actor.to_learn()
    assert (there(of_actor), there(of_critic)) == ([True, True, False], [False] * 3)
    actor.to_update()
    assert (there(of_actor), there(of_critic)) == ([True, True, True], [False] * 3)
    critic.to_learn()
    assert (there(of_actor), there(of_critic)) == ([False] * 3, [True, True, False])
    device_memory.keep_only()
    assert (there(of_actor), there(of_critic)) == ([False] * 3, [False] * 3)


def test_state_is_read_and_filled_in_place() -> None:
    """Nothing moves for it. What is filled while it is away is there when it comes; an offset view is that view."""
    device_memory = DeviceMemory(CPU)
    parts, (weights, _, moments) = role(device_memory, parameters=True, optimizer=True)
    view = moments[1:3]
    parts.to_compute()
    view_of = parts.to_read()
    assert view_of(weights) is weights
    assert (there([weights, moments]), view_of(moments).tolist(), view_of(view).tolist()) == (
        [True, False], [2.0] * 4, [2.0] * 2,
    )  # fmt: skip
    view_of(view).fill_(7.0)
    assert there([weights, moments]) == [True, False]
    parts.to_update()
    assert moments.tolist() == [2.0, 7.0, 7.0, 2.0]
    assert parts.to_read()(view) is view


def test_what_may_not_leave_stays_and_gradients_leave_unasked() -> None:
    device_memory = DeviceMemory(CPU, shared=True)
    _, tensors = role(device_memory)
    device_memory.keep_only()
    assert there(tensors) == [True, False, True], "auto is false on a CPU"
    device_memory = DeviceMemory(CPU)
    _, tensors = role(device_memory, gradients=False)
    device_memory.keep_only()
    assert there(tensors) == [True] * 3
