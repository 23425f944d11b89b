"""The configuration reference has every key of every command, and pages name no key that there is not."""

import re
import subprocess
import sys
import types
from typing import Union, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel

from megarlhf.commands import cli
from megarlhf.config import DPOConfig, RLConfig, RMConfig, SFTConfig, SourceConfig, load_config
from megarlhf.config.serve import ServeRewardConfig
from tests.docs.repository import PRESENT, ROOT, code, path_of
from tests.refuses import missing_names
from tools.docs.configuration import PAGE, page_with_reference, reference
from tools.docs.pages import PLACEHOLDERS, with_key_anchors

SETS = ("data.train", "data.validation", "data.test", "ptx.data")
ROLES = {"actor", "against", "critic", "reference", "reward_model"}


def models_in(annotation: object) -> tuple[type[BaseModel] | None, str]:
    """The section that a field's annotation holds, and `[]` for a list of it. Read apart from the JSON schema."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, ""
    inside = [models_in(part)[0] for part in get_args(annotation)]
    many = "" if get_origin(annotation) in (Union, types.UnionType) else "[]"
    return next(((model, many) for model in inside if model is not None), (None, ""))


def keys_of(model: type[BaseModel]) -> set[str]:
    keys = set()
    for name, field in model.model_fields.items():
        inner, many = models_in(field.annotation)
        if inner is SourceConfig:
            keys |= {name, *(f"SET.{key}" for key in inner.model_fields)}
            continue
        keys |= {f"{name}{many}.{key}" for key in keys_of(inner)} if inner is not None else {name}
    return keys


def as_role(key: str) -> str:
    first, _, rest = key.partition(".")
    if (of_set := rest.rpartition("SET.")) and of_set[1]:
        return f"SET.{of_set[2]}"
    return f"ROLE.{rest}" if first in ROLES else key


def all_keys() -> set[str]:
    configs = [*(command.config for command in cli.COMMANDS.values()), ServeRewardConfig]
    return {as_role(key) for config in configs for key in keys_of(config)}


def rows() -> dict[str, list[tuple[str, str]]]:
    """(commands, row) of the reference by key: the commands that the row names, else those of its heading."""
    rows_of: dict[str, list[tuple[str, str]]] = {}
    heading = ""
    for line in reference().splitlines():
        if line.startswith("## "):
            heading = line
        elif row := re.match(r"\| `([^`]+)`(?: \(([^)]*)\))? \|", line):
            rows_of.setdefault(row[1], []).append((row[2] or heading, line))
    return rows_of


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_the_reference_has_every_key_of_every_command(command):
    """And none that it refuses whatever it says."""
    given = rows()
    config = cli.COMMANDS[command].config
    every = keys_of(config)
    keys = every - config.refused
    assert len(every) - len(keys) == len(config.refused)
    assert not any(command in heading for key in config.refused for heading, _ in given.get(as_role(key), []))
    assert {"run.dir", "run.seed"} < keys
    headings = {key: [heading for heading, _ in given.get(as_role(key), [])] for key in keys}
    missing = {
        key for key, of in headings.items() if not any(command in head or head in ("## ROLE", "## SET") for head in of)
    }
    assert missing == set()


def test_the_reference_has_no_other_keys_and_says_type_and_default():
    given = rows()
    assert set(given) == all_keys()
    ((_, tp),) = given["ROLE.parallel.tp"]
    ((_, directory),), ((_, engine),) = given["run.dir"], given["rollout.engine"]
    assert [missing_names(tp, "above 0", "`1`"), missing_names(directory, "path", "required")] == [[], []]
    assert not missing_names(engine, "`vllm` or `megatron`", "`vllm` |")
    cells = {len(re.split(r"(?<!\\)\|", re.sub("`[^`]*`", "", line))) for lines in given.values() for _, line in lines}
    assert cells == {6}, "a bar in a description breaks a row"
    lines = [line for of in given.values() for _, line in of]
    assert [line for line in lines if "| anything |" in line or line.endswith("|  |")] == [], "no type, or no docstring"


_KEY = re.compile(r"(?<![\w./=-])((?:[a-z_]+|ROLE)(?:\[\])?(?:\.[a-z_]+(?:\[\])?)+)(?=[^\w(:/]|$)")


def unknown_keys(spans: list[str]) -> list[str]:
    """Configuration keys in code that no command knows; a section's own name is known."""
    known = all_keys()
    known |= {f"{key}.{part}" for key in SETS for part in SourceConfig.model_fields}
    tops = {key.split(".")[0] for key in known if "." in key} | ROLES
    prefixes = {key[:n] for key in known for n in range(len(key) + 1) if key[n : n + 1] in ("", ".")}
    unknown = []
    for span in spans:
        for key in _KEY.findall(re.sub(r"\{[^}]*\}", "", span)):
            if (
                key.split(".")[0] in tops
                and as_role(key) not in prefixes
                and not re.search(r"\.(py|md|yaml|jsonl?|ya?ml|html|sh)$", key)
            ):
                unknown.append(key)
    return unknown


@pytest.mark.parametrize("page", PRESENT, ids=path_of)
def test_configuration_keys_exist(page):
    assert unknown_keys(code(page)) == []


def test_an_unknown_key_is_found():
    spans = ["rollout.temperature", "rollout.max_gap=3", "actor.parallel.tp=2 actor.paralel.tp=2", "ROLE.model.hf"]
    assert unknown_keys([*spans, "data.jsonl", "train.stop"]) == ["rollout.max_gap", "actor.paralel.tp"]


@pytest.mark.parametrize("name, kind", [("sft", SFTConfig), ("rm", RMConfig), ("dpo", DPOConfig), ("ppo", RLConfig)])
def test_the_example_configurations_load(name, kind):
    assert load_config(kind, ROOT / "configs" / "example" / f"{name}.yaml").run.nproc == 8
    block = next(b for b in code(ROOT / "docs" / "configuration.md") if b.startswith("yaml\n# sft.yaml"))
    SFTConfig.model_validate(yaml.safe_load(block.removeprefix("yaml\n")))


def test_the_page_has_the_reference_of_this_code():
    page = PAGE.read_text(encoding="utf-8")
    assert page == page_with_reference(page), "run `python -m tools.docs.configuration --write`"


def test_every_key_has_an_anchor_on_the_site():
    """Keys of roles and of sets of records under each of their names."""
    assert {prefix: set(names) for prefix, names in PLACEHOLDERS.items()} == {"ROLE": ROLES, "SET": set(SETS)}
    table = re.sub(r"^\| (`[^`]+`)(?: \([^)]*\))? \|", r"<tr><td><code>\1</code>", reference(), flags=re.MULTILINE)
    _, anchors = with_key_anchors("<!-- made by" + table.replace("<code>`", "<code>").replace("`</code>", "</code>"))
    assert len(anchors) == len(set(anchors))
    assert {key.replace("[]", "") for key in rows()} <= set(anchors)
    assert {"algo.kl.coef", "actor.optim.lr", "critic.optim.lr", "data.train.path"} <= set(anchors)


def test_the_reference_is_printed():
    command = [sys.executable, "-m", "tools.docs.configuration"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == reference()
