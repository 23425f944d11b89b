"""The public names: importable, typed, documented, and free of charge until they are used."""

import ast
import inspect
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest

import megarlhf

PACKAGE = Path(megarlhf.__file__).parent
NAMES = [name for name in megarlhf.__all__ if name != "__version__"]


def test_the_import_takes_neither_torch_nor_pydantic():
    """Reward workers import the package. A name costs its module when it is first used."""
    code = "import sys, megarlhf; print(sorted({'torch', 'pydantic', 'numpy', 'yaml'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_three_lists_of_names_agree():
    """`__all__`, the table of modules, and the imports for type checkers, which name the same object."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    typed = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        typed |= {alias.asname or alias.name: f"{node.module}:{alias.name}" for alias in node.names}
    exports = {
        name: ":".join(place.rsplit(":" if ":" in place else ".", 1)) for name, place in megarlhf._EXPORTS.items()
    }
    assert typed == exports
    assert sorted(NAMES) == sorted(typed)
    assert dir(megarlhf) == sorted(megarlhf.__all__)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_documented_and_typed(name):
    """With its public methods; every argument and what is returned."""
    value = getattr(megarlhf, name)
    if isinstance(value, Mapping | ModuleType):  # a table of named parts, or a module that has a list of its own
        assert value if isinstance(value, Mapping) else value.__all__
        return
    members = [value] if not inspect.isclass(value) else [value, *_methods(value)]
    for member in members:
        assert (member.__doc__ or "").strip(), f"{member} says nothing"
        if not inspect.isclass(member):
            signature = inspect.signature(member)
            untyped = [p.name for p in signature.parameters.values() if p.annotation is p.empty and p.name != "self"]
            assert untyped == []
            assert signature.return_annotation is not signature.empty


def _methods(kind):
    for name, member in vars(kind).items():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if inspect.isfunction(function) and not name.startswith("_"):
            yield function


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'rum'"):
        _ = megarlhf.rum
    assert not hasattr(megarlhf, "__wrapped__")


def test_type_checkers_read_the_types():
    assert (PACKAGE / "py.typed").is_file()
    setup = PACKAGE.parent / "setup.py"
    assert not setup.is_file() or '"py.typed"' in setup.read_text()


def test_these_tests_import_what_a_user_would():
    known = {"megarlhf", "torch", "pytest", *sys.stdlib_module_names}
    for file in sorted(Path(__file__).parent.glob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert {module.split(".")[0] for module in modules} <= known, file
            assert not any(module.startswith("megarlhf.") for module in modules), file
