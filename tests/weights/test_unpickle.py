"""Pickles that name other classes: refused, or read as records; nothing of theirs is run. Not covered: pickles that ask
for more memory than there is."""

from __future__ import annotations

import os
import pickle
import subprocess
from typing import Any, ClassVar

import pytest
import torch

from megarlhf.weights.checkpoint.formats.torch_file.archive import read_torch_file
from megarlhf.weights.checkpoint.formats.torch_file.unpickle import ALLOWED, ForeignObject, InertObject, unpickle
from tests.refuses import refuses


class Evil:
    """Calls a function when unpickled."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("function, args, name", [
    (os.system, ("touch {}",), "posix.system"), (eval, ("open('{}', 'w')",), "builtins.eval"),
    (exec, ("open('{}', 'w')",), "builtins.exec"), (getattr, (os, "system"), "builtins.getattr"),
    (subprocess.check_call, (["touch", "{}"],), "subprocess.check_call"), (open, ("{}", "w"), "open"),
    (os.mkdir, ("{}",), "posix.mkdir"),
])  # fmt: skip
def test_other_names_are_refused_and_not_run(tmp_path, function, args, name):
    """Control: plain pickle runs them (shown for mkdir)."""
    mark = tmp_path / "ran"
    filled = tuple([a.format(mark) for a in arg] if isinstance(arg, list) else arg for arg in args)
    filled = tuple(arg.format(mark) if isinstance(arg, str) else arg for arg in filled)
    if function is getattr:
        filled = ("os", "system")
    for protocol in range(6):
        raw = pickle.dumps({"args": Evil(function, *filled)}, protocol)
        with refuses(name, "allow-list"):
            unpickle(raw)
        if function is getattr:  # harmless as a record; bound methods are pickled so
            assert repr(type(unpickle(raw, foreign=True)["args"])) == "builtins.getattr"
            continue
        with refuses(name, "allow-list", "ask who made it"):
            unpickle(raw, foreign=True)
    path = tmp_path / "x.pt"
    torch.save({"args": Evil(function, *filled)}, path)
    with refuses("x.pt", name):
        read_torch_file(path)
    assert not mark.exists()
    if function is os.mkdir:
        pickle.loads(raw)
        assert mark.exists()


class Trap:
    """Would note each of its methods that pickle calls; stands under a module on the inert list."""

    ran: ClassVar[list[str]] = []

    def __init__(self) -> None:
        Trap.ran.append("init")

    def __setstate__(self, state: Any) -> None:
        Trap.ran.append("setstate")

    def __reduce__(self) -> Any:
        return Trap, (), {"a": 1}


def test_inert_classes_become_records_and_run_nothing(monkeypatch):
    """The very same bytes run code under plain pickle."""
    import sys
    from types import ModuleType

    module = ModuleType("megatron_trap")
    module.Trap = Trap
    monkeypatch.setitem(sys.modules, "megatron_trap", module)
    monkeypatch.setattr(Trap, "__module__", "megatron_trap")
    raw = pickle.dumps(Trap(), 2)
    with refuses("megatron_trap.Trap"):
        unpickle(raw)
    Trap.ran.clear()
    foreign = unpickle(raw, foreign=True)
    assert isinstance(foreign, ForeignObject)
    assert (repr(type(foreign)), foreign.state) == ("megatron_trap.Trap", {"a": 1})
    read = unpickle(raw, inert=("megatron_trap",))
    assert (repr(type(read)), read.args, read.state) == ("megatron_trap.Trap", (), {"a": 1})
    assert isinstance(read, InertObject)
    assert Trap.ran == []
    pickle.loads(raw)
    assert Trap.ran == ["init", "setstate"]


def test_what_stands_on_the_list_cannot_be_changed_or_called_again():
    """Written out: state for a class or a constant, a call of a record, a call of a value, codes of copyreg."""
    inert = b"cmegatron.core\nThing\n"
    state, slots = b"}X\x01\x00\x00\x00aK\x01s", b"N}X\x01\x00\x00\x00aK\x01s\x86"
    ways = {
        "damaged": (
            b"ccollections\nOrderedDict\n" + slots + b"b.", b"cdatetime\ntimedelta\n" + slots + b"b.",
            b"ctypes\nSimpleNamespace\n" + slots + b"b.", b"ctorch\ndevice\n" + slots + b"b.",
            b"ctorch\nfloat32\n" + state + b"b.", b"ctorch\nfloat32\n" + slots + b"b.", inert + state + b"b.",
            b"cbuiltins\nset\n)R" + state + b"b.", b"(", b"",
        ),
        "not callable": (inert + b")R)R.", b"K\x01)R.", b"ctorch\nfloat32\n)R."),
        "extension code": (b"\x80\x02\x82\x01.",), "outside itself": (b"P1\n.",),
    }  # fmt: skip
    for fault, pickles in ways.items():
        for raw in pickles:
            with refuses(fault):
                unpickle(raw)
    for made in (inert + b")R.", b"(" + inert + b"o.", b"(imegatron.core\nThing\n."):
        assert repr(type(unpickle(made))) == "megatron.core.Thing"
    mine = unpickle(b"cmine\nPair\n(K\x01K\x02tR.", allowed={**ALLOWED, ("mine", "Pair"): lambda a, b: a + b})
    assert mine == 3


def test_every_class_on_the_list_is_built_in_and_nothing_outlives_a_load():
    """What a pickle may set attributes on: not a class of the list; a function or stand-in of its own load alone."""
    classes = [value for value in ALLOWED.values() if isinstance(value, type)]
    assert len(classes) > 10
    for cls in classes:
        with pytest.raises(TypeError):
            cls.mark = 1
        assert not hasattr(cls, "__setstate__"), cls
    slots = b"N}X\x0c\x00\x00\x00__defaults__(K\x07)ts\x86b."
    function = b"ccollections\ndeque\n"
    assert unpickle(function + slots).__defaults__ == (7, ())
    assert unpickle(function + b".").__defaults__ is None
    stand_in = b"cmegatron.core\nThing\n"
    assert unpickle(stand_in + b".") is not unpickle(stand_in + b".")
    assert unpickle(b"ccollections\ndeque\n)R.") == []


def test_a_pickle_makes_no_extent_of_another_file(tmp_path):
    """State for a tensor that was read: refused, else any file's bytes would be taken for weights."""

    path = tmp_path / "x.pt"
    with pytest.MonkeyPatch.context() as patch:
        tensor = torch.ones(3)
        real = torch.Tensor.__reduce_ex__

        def with_state(self, protocol):
            function, args = real(self, protocol)[:2]
            return function, args, (None, {"path": "elsewhere"})

        patch.setattr(torch.Tensor, "__reduce_ex__", with_state)
        torch.save({"a": tensor}, path)
    with refuses("no state", "pickle"):
        read_torch_file(path)
