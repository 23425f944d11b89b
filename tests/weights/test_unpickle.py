"""Pickles that name other classes: refused, or read as records; nothing of theirs is run.

Not covered: pickles that ask for more memory than there is.
"""

from __future__ import annotations

import os
import pickle
import subprocess
from typing import Any, ClassVar

import pytest
import torch

from megarlhf.weights.checkpoint.formats.torch_file.archive import read_torch_file
from megarlhf.weights.checkpoint.formats.torch_file.unpickle import ALLOWED, Global, Record, unpickle


class Evil:
    """Calls a function when unpickled."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    "function, args, name",
    [
        (os.system, ("touch {}",), r"(posix|nt)\.system"),
        (eval, ("open('{}', 'w')",), r"builtins\.eval"),
        (exec, ("open('{}', 'w')",), r"builtins\.exec"),
        (subprocess.check_call, (["touch", "{}"],), r"subprocess\.check_call"),
        (open, ("{}", "w"), r"io\.open|_io\.open"),
        (getattr, (os, "system"), r"builtins\.getattr"),
        (os.mkdir, ("{}",), r"posix\.mkdir"),
    ],
)
def test_other_names_are_refused_and_not_run(tmp_path, function, args, name):
    """Control: plain pickle runs them (shown for mkdir)."""
    mark = tmp_path / "ran"
    filled = tuple([a.format(mark) for a in arg] if isinstance(arg, list) else arg for arg in args)
    filled = tuple(arg.format(mark) if isinstance(arg, str) else arg for arg in filled)
    if function is getattr:
        filled = ("os", "system")
    for protocol in range(6):
        raw = pickle.dumps({"args": Evil(function, *filled)}, protocol)
        with pytest.raises(ValueError, match=rf"({name}), which is not on the allow-list"):
            unpickle(raw)
    path = tmp_path / "x.pt"
    torch.save({"args": Evil(function, *filled)}, path)
    with pytest.raises(ValueError, match=rf"x\.pt names ({name})"):
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
    with pytest.raises(ValueError, match=r"megatron_trap\.Trap"):
        unpickle(raw)
    Trap.ran.clear()
    read = unpickle(raw, inert=("megatron_trap",))
    assert (read.type, read.args, read.state) == (Global("megatron_trap", "Trap"), (), {"a": 1})
    assert isinstance(read, Record)
    assert Trap.ran == []
    pickle.loads(raw)
    assert Trap.ran == ["init", "setstate"]


def test_what_stands_on_the_list_cannot_be_changed_or_called_again():
    """By hand: state for a class, a call of a record, a call of a value, opcodes of protocol 1."""
    inert = b"cmegatron.core\nThing\n"
    ways = {
        b"ccollections\nOrderedDict\n(NX\x01\x00\x00\x00aK\x01d\x86b.": "damaged|sets the state",
        inert + b")R)R.": "calls a Record",
        b"K\x01)R.": "calls a int",
        b"ctorch\nfloat32\n)R.": "calls a dtype",
        b"ctorch\nfloat32\n}b.": "sets the state of a dtype",
        inert + b"}b.": "sets the state of a Global",
        b"(" + inert + b"o.": "opcode",
        b"(imegatron.core\nThing\n.": "opcode",
        b"\x80\x02\x82\x01.": "opcode",
        b"cbuiltins\nset\n}R}b.": "calls|damaged",
        b"P1\n.": "outside itself",
        b"(": "damaged",
        b"": "damaged",
    }
    for raw, message in ways.items():
        with pytest.raises(ValueError, match=message):
            unpickle(raw)
    assert unpickle(inert + b")R.").type == Global("megatron.core", "Thing")
    mine = unpickle(b"cmine\nPair\n(K\x01K\x02tR.", allowed={**ALLOWED, ("mine", "Pair"): lambda a, b: a + b})
    assert mine == 3
