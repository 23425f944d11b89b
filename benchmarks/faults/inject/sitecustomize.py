"""Found by Python at its start where this folder is in PYTHONPATH: plants one fault in a method, at one of its calls.

FAULTS_PLANT=MODULE:CLASS.METHOD:CALL:KIND:RANK   KIND is `raise`, or `nan` (in a gradient of a Trainer)
FAULTS_PLANTED=FILE                               made when it happens; where it is there already, nothing does
"""

import importlib.util
import os
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path


def _plant(module, owner, method, call, kind):
    place = getattr(module, owner)
    real, calls = getattr(place, method), []

    def planted(self, *arguments, **options):
        calls.append(1)
        if len(calls) == call and not Path(os.environ["FAULTS_PLANTED"]).exists():
            Path(os.environ["FAULTS_PLANTED"]).touch()
            if kind == "raise":
                raise RuntimeError(f"planted in {owner}.{method}")
            next(p for p in self.module.parameters() if p.requires_grad).main_grad.view(-1)[3] = float("nan")
        return real(self, *arguments, **options)

    setattr(place, method, planted)


class _WhenImported(MetaPathFinder):
    def __init__(self, name, *fault):
        self.name, self.fault = name, fault

    def find_spec(self, name, path, target=None):
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            _plant(module, *self.fault)

        spec.loader.exec_module = exec_module
        return spec


if "FAULTS_PLANT" in os.environ:
    _module, _place, _call, _kind, _rank = os.environ["FAULTS_PLANT"].split(":")
    if os.environ.get("RANK", "0") == _rank:
        _owner, _method = _place.split(".")
        sys.meta_path.insert(0, _WhenImported(_module, _owner, _method, int(_call), _kind))
