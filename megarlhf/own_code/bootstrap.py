"""Run a module of megarlhf under an interpreter without megarlhf: `PYTHON bootstrap.py MODULE ARGUMENT...`.

The package megarlhf is made importable, and nothing that stands beside it. Then the module's `main` is called. A
process that the user's code starts by multiprocessing loads this file again, so that megarlhf is importable there too.
Any Python 3 can read this file, and the module refuses one that is too old.
"""

import importlib
import importlib.util
import os
import sys


def _make_importable() -> None:
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    spec = importlib.util.spec_from_file_location(
        "megarlhf", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules["megarlhf"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["megarlhf"])


if "megarlhf" not in sys.modules:
    _make_importable()
if __name__ == "__main__":
    if os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
        sys.path[0] = os.getcwd()  # as `python -m` has it
    del sys.argv[0]
    importlib.import_module(sys.argv[0]).main()
