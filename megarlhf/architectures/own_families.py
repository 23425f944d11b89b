"""Model families of the user: modules named in `model.families` of a role, or by `--family`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

from megarlhf.architectures.check_family import check_family
from megarlhf.architectures.families import register
from megarlhf.architectures.table import Family
from megarlhf.config import RoleConfig
from megarlhf.own_code.digest import digest_of_module
from megarlhf.own_code.failures import short
from megarlhf.own_code.load import load_module

ADVICE = "docs/new-architecture.md shows one"


def register_families_of(roles: Mapping[str, RoleConfig]) -> None:
    """Make the user's families known in this process. Called once a configuration is loaded, on every rank too.

    Raises: ValueError for a module that cannot be imported, or without a family that can be used.
    """
    register_families(_modules_of(roles))


def register_families(modules: Iterable[str]) -> None:
    """Make the families of these modules known in this process. Raises: ValueError as `register_families_of`."""
    for name in modules:
        label = f"model family {name!r}"
        if ":" in name:
            raise ValueError(f"{label}: expected a module, without a name in it; give {name.partition(':')[0]}")
        for where, family in _families_in(load_module(name, label), label):
            check_family(family, f"{label}: {where}")
            register(family, name)


def family_sources(roles: Mapping[str, RoleConfig]) -> dict[str, str]:
    """Digest of the source of each module with families of the user, by the text `model family MODULE`."""
    return {f"model family {name}": digest_of_module(name, f"model family {name!r}") for name in _modules_of(roles)}


def _modules_of(roles: Mapping[str, RoleConfig]) -> list[str]:
    return list(dict.fromkeys(name for role in roles.values() for name in role.model.families))


def _families_in(module: ModuleType, label: str) -> list[tuple[str, Any]]:
    """Objects that should be families, each with its name in the module. Raises: ValueError if there is none."""
    names = vars(module)
    several = names.get("FAMILIES", ())
    if not isinstance(several, list | tuple):
        raise ValueError(f"{label}: FAMILIES is {short(several)}, expected a list of Family; {ADVICE}")
    families = [("FAMILY", names["FAMILY"])] if "FAMILY" in names else []
    families += [(f"FAMILIES[{number}]", family) for number, family in enumerate(several)]
    if not families:
        others = [name for name, value in names.items() if isinstance(value, Family)]
        hint = f"; call it so: it has the family {others[0]}" if others else f"; {ADVICE}"
        raise ValueError(f"{label}: {module.__file__} has neither FAMILY nor FAMILIES{hint}")
    types = [getattr(family, "model_type", None) for _, family in families]
    for number, (where, _) in enumerate(families):
        if types[number] is not None and types[number] in types[:number]:
            raise ValueError(f"{label}: {where} has model_type {types[number]!r} as the one before; give it another")
    return families
