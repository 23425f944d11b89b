"""The documentation: what it names exists, what it quotes is said, what it counts is complete.

Not covered: the build itself (`make docs`, strict, which CI runs), and whether the sentences are true.
"""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
import sys
import types
from functools import cache
from pathlib import Path
from typing import Union, get_args, get_origin

import pytest
import yaml
from markdown.extensions.toc import slugify
from pydantic import BaseModel

from megarlhf.commands import cli
from megarlhf.commands.convert import parser as convert_parser
from megarlhf.config import RLConfig, RMConfig, SFTConfig, load_config
from tools.docs import pages
from tools.docs.configuration import reference

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
PRESENT = [page for page in PAGES if page.name != "log.md"]
"""The log speaks of the past: it names what is no more."""

CODE = re.compile(r"^```.*?^```$|(?:^    [^\n]*\n)+|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def code(page: Path) -> list[str]:
    """Code spans and blocks of a page, without their marks."""
    return [found.strip("`\n") for found in CODE.findall(text(page))]


def folder(page: Path) -> str:
    return page.parent.relative_to(ROOT).as_posix().removeprefix(".")


@cache
def files() -> list[str]:
    """The repository's files, with a slash in front."""
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = [f"/{name}" for name in names.stdout.splitlines() if (ROOT / name).is_file()]
    assert len(found) > 300, "the repository was not read"
    return found


# --- links ----------------------------------------------------------------------------------------


@cache
def anchors(page: Path) -> set[str]:
    """Where a link may lead on a page."""
    markdown = text(page).replace(pages.MARKER, reference())
    outside = re.sub(r"^```.*?^```$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    return {slugify(title.replace("`", ""), "-") for title in re.findall(r"^#+ (.*)$", outside, re.MULTILINE)}


def broken_links(markdown: str, page: Path) -> list[str]:
    found = []
    for target in pages.links(markdown):
        if pages.is_external(target):
            continue
        path, anchor = pages.place(target, folder(page))
        there = ROOT / path if path else page
        if not there.is_file() or (anchor and anchor not in anchors(there)):
            found.append(target)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    assert broken_links(text(page), page) == []


def test_a_broken_link_is_found():
    page = ROOT / "docs" / "data.md"
    markdown = "[a](nowhere.md) [b](packing.md#nowhere) `[c](code.md)` [d](../README.md) [e](#rewards) [f](#nowhere)"
    assert broken_links(markdown, page) == ["nowhere.md", "packing.md#nowhere", "#nowhere"]


def test_every_page_is_in_the_navigation():
    """And nothing else is, but for the first page, which is README.md."""
    listed = re.findall(r": ([\w/-]+\.md)$", text(ROOT / "mkdocs.yml"), re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert {"index.md", *(page.relative_to(ROOT / "docs").as_posix() for page in PAGES[1:])} == set(listed)


def test_links_out_of_docs_become_pages_of_the_site():
    markdown = "[a](../megarlhf/layout.py) [b](data.md#rewards) [c](../README.md) [d](https://x.y) `[e](../README.md)`"
    assert pages.sources(markdown, "docs") == {"megarlhf/layout.py", "README.md"}
    assert pages.for_the_site(markdown, "docs", "x/page.md") == (
        "[a](../source/megarlhf/layout.py.md) [b](../data.md#rewards) [c](../index.md) [d](https://x.y) "
        "`[e](../README.md)`"
    )
    assert pages.for_the_site("[a](docs/data.md)", "", "index.md") == "[a](data.md)"
    assert "def split_layers" in pages.source_page("megarlhf/layout.py")


# --- names ----------------------------------------------------------------------------------------

_PATH = re.compile(r"(?<![\w./{*-])([\w./-]+(?:\.py|\.yaml|\.sbatch|\.md|/))(?:::([\w.]+))?(?![\w*{.])")
NOT_OURS = {
    "vllm/model_executor/models/",
    "gpt_layer_specs.py",
    "my_rules.py",
    "sft.yaml",
    "config.yaml",
    "hf/",
    "runs/",
    "data/",
    "tensorboard/",
    "checkpoints/",
    "release/",
    "docs/benchmarks/gpu-logprob.md",
}
"""Other projects' sources, what a reader has or is shown how to write, and what a benchmark makes."""


def unknown_names(spans: list[str]) -> list[str]:
    """Paths of ours that do not exist, and `file.py::name` whose file has no such name."""
    found = []
    for span in spans:
        for path, name in _PATH.findall(span):
            if path in NOT_OURS or path.startswith(("runs/", "/", "checkpoints/", "build/")):
                continue
            ends = f"/{path.removeprefix('./')}"
            hits = [file for file in files() if (ends in file if path.endswith("/") else file.endswith(ends))]
            if not hits or (name and not any(defines(ROOT / file[1:], name) for file in hits)):
                found.append(f"{path}::{name}" if name else path)
    return found


def defines(file: Path, name: str) -> bool:
    """Whether a Python file defines a function, class, constant, or Class.method or Class.field of this name."""
    body: list[ast.stmt] = ast.parse(text(file)).body
    for part in name.split("."):
        named = {
            key: node
            for node in body
            for key in (
                [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef)
                else [t.id for t in node.targets if isinstance(t, ast.Name)] if isinstance(node, ast.Assign)
                else [node.target.id] if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
                else []
            )
        }  # fmt: skip
        if part not in named:
            return False
        body = getattr(named[part], "body", [])
    return True


@pytest.mark.parametrize("page", PRESENT, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_and_functions_exist(page):
    assert unknown_names(code(page)) == []


def test_an_unknown_name_is_found():
    spans = ["trainers/rl.py::run", "trainers/rl.py::walk", "rollout/vllm_engine.py::VllmEngine.generate"]
    spans += ["rollout/vllm_engine.py::VllmEngine.sing", "trainers/nothing.py", "architectures/families/", "cellar/"]
    assert unknown_names(spans) == [
        "trainers/rl.py::walk", "rollout/vllm_engine.py::VllmEngine.sing", "trainers/nothing.py", "cellar/"
    ]  # fmt: skip


def commands() -> set[str]:
    return set(cli.parser()._subparsers._group_actions[0].choices)  # type: ignore[union-attr]


def test_commands_exist():
    """`megarlhf COMMAND`, `megarlhf convert COMMAND` and `make TARGET`."""
    spans = list(itertools.chain.from_iterable(map(code, PRESENT)))
    lines = [line.split("#")[0] for span in spans for line in span.splitlines()]
    named = {found for line in lines for found in re.findall(r"(?:^|-m |&& )megarlhf ([a-z][a-z-]*)", line.strip())}
    assert named >= {"sft", "rm", "rl", "generate", "eval", "plan", "report", "doctor", "convert"}, "not read"
    assert named <= commands()
    conversions = {f for line in lines for f in re.findall(r"(?:megarlhf convert|checkpoint_convert) ([a-z-]+)", line)}
    assert conversions >= {"hf-to-megatron", "inspect"}
    assert conversions <= set(convert_parser("x")._subparsers._group_actions[0].choices)  # type: ignore[union-attr]
    targets = {found for line in lines for found in re.findall(r"(?:^|\s)make ([a-z0-9-]+)", line)}
    assert targets >= {"demo", "test", "docs"}
    assert targets <= set(re.findall(r"^([a-z0-9-]+):", text(ROOT / "Makefile"), re.MULTILINE))


# --- configuration --------------------------------------------------------------------------------

ROLES = {"actor", "critic", "reference", "reward_model"}


def models_in(annotation: object) -> tuple[type[BaseModel] | None, str]:
    """The section that a field's annotation holds, and `[]` for a list of it. Read apart from the JSON schema."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, ""
    inside = [models_in(part)[0] for part in get_args(annotation)]
    many = "" if get_origin(annotation) in (Union, types.UnionType) else "[]"
    return next(((model, many) for model in inside if model is not None), (None, ""))


def keys_of(model: type[BaseModel]) -> set[str]:
    found = set()
    for name, field in model.model_fields.items():
        inner, many = models_in(field.annotation)
        found |= {f"{name}{many}.{key}" for key in keys_of(inner)} if inner is not None else {name}
    return found


def as_role(key: str) -> str:
    first, _, rest = key.partition(".")
    return f"ROLE.{rest}" if first in ROLES else key


def all_keys() -> set[str]:
    return {as_role(key) for command in cli.COMMANDS.values() for key in keys_of(command.config)}


def rows() -> dict[str, list[tuple[str, str]]]:
    """(heading, row) of the reference by key."""
    found: dict[str, list[tuple[str, str]]] = {}
    heading = ""
    for line in reference().splitlines():
        if line.startswith("## "):
            heading = line
        elif line.startswith("| `"):
            found.setdefault(line.split("`")[1], []).append((heading, line))
    return found


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_the_reference_has_every_key_of_every_command(command):
    given = rows()
    keys = keys_of(cli.COMMANDS[command].config)
    assert {"run.dir", "run.seed"} < keys
    headings = {key: [heading for heading, _ in given.get(as_role(key), [])] for key in keys}
    missing = {key for key, of in headings.items() if not any(command in head or head == "## ROLE" for head in of)}
    assert missing == set()


def test_the_reference_has_no_other_keys_and_says_type_and_default():
    given = rows()
    assert set(given) == all_keys()
    ((_, tp),) = given["ROLE.parallel.tp"]
    assert "| whole number, above 0 | `1` |" in tp
    ((_, directory),) = given["run.dir"]
    assert directory.startswith("| `run.dir` | path | required | Run directory")
    ((_, engine),) = given["rollout.engine"]
    assert "| `vllm` or `megatron` | `vllm` |" in engine
    cells = {len(re.split(r"(?<!\\)\|", line)) for lines in given.values() for _, line in lines}
    assert cells == {6}, "a bar in a description breaks a row"
    assert not [line for lines in given.values() for _, line in lines if "anything" in line]


_KEY = re.compile(r"(?<![\w./=-])((?:[a-z_]+|ROLE)(?:\[\])?(?:\.[a-z_]+(?:\[\])?)+)(?=[^\w(:/]|$)")


def unknown_keys(spans: list[str]) -> list[str]:
    """Configuration keys in code that no command knows; a section's own name is known."""
    known = all_keys()
    tops = {key.split(".")[0] for key in known if "." in key} | ROLES
    prefixes = {key[:n] for key in known for n in range(len(key) + 1) if key[n : n + 1] in ("", ".")}
    found = []
    for span in spans:
        for key in _KEY.findall(re.sub(r"\{[^}]*\}", "", span)):
            if (
                key.split(".")[0] in tops
                and as_role(key) not in prefixes
                and not re.search(r"\.(py|md|yaml|jsonl?|ya?ml|html|sh)$", key)
            ):
                found.append(key)
    return found


@pytest.mark.parametrize("page", PRESENT, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_configuration_keys_exist(page):
    assert unknown_keys(code(page)) == []


def test_an_unknown_key_is_found():
    spans = ["rollout.temperature", "rollout.max_gap=3", "actor.parallel.tp=2 actor.paralel.tp=2", "ROLE.model.hf"]
    assert unknown_keys([*spans, "data.jsonl", "train.stop"]) == ["rollout.max_gap", "actor.paralel.tp"]


@pytest.mark.parametrize("name, kind", [("sft", SFTConfig), ("rm", RMConfig), ("ppo", RLConfig)])
def test_the_example_configurations_load(name, kind):
    assert load_config(kind, ROOT / "configs" / "example" / f"{name}.yaml").run.nproc == 8
    block = next(b for b in code(ROOT / "docs" / "configuration.md") if b.startswith("yaml\n# sft.yaml"))
    SFTConfig.model_validate(yaml.safe_load(block.removeprefix("yaml\n")))


# --- what is quoted and counted -------------------------------------------------------------------


@cache
def messages() -> str:
    """Every text of the package and the Makefile; where a value goes into one, a gap."""
    found = [text(ROOT / "Makefile").replace('" \\\n\t\t"', "")]
    for file in (ROOT / "megarlhf").rglob("*.py"):
        for node in ast.walk(ast.parse(text(file))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(v.value) if isinstance(v, ast.Constant) else "\0" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_quoted_messages_are_said():
    """The left column of the tables of refusals quotes the code."""
    quoted = re.findall(r"^\| `([^`]+)` \|", text(ROOT / "docs" / "refusals.md"), re.MULTILINE)
    assert len(quoted) > 20
    assert [quote for quote in quoted if quote not in messages()] == []


def test_the_readme_is_short_and_leads_to_what_people_ask():
    """Under 750 words; never run on a GPU stands near the top."""
    readme = text(ROOT / "README.md")
    assert len(readme.split()) < 750
    assert "never run" in "\n".join(readme.splitlines()[:12])
    targets = pages.links(readme)
    for page in ("follow-one-token", "new-architecture", "new-advantage", "refusals", "configuration", "glossary"):
        assert f"docs/{page}.md" in targets


def test_every_room_is_in_the_architecture():
    rooms = [path.name for path in (ROOT / "megarlhf").iterdir() if (path / "__init__.py").is_file()]
    assert "trainers" in rooms
    assert [room for room in rooms if f"`{room}/" not in text(ROOT / "docs" / "design.md")] == []


@pytest.mark.parametrize("page", ["follow-one-token", "new-advantage"])
def test_python_on_the_pages_runs(page):
    """The gradient of one token is -1/8, as it says; the new advantage gives the numbers that it says."""
    block = next(b for b in code(ROOT / "docs" / f"{page}.md") if b.startswith("python\n")).removeprefix("python\n")
    names: dict[str, object] = {}
    exec(f"from __future__ import annotations\nimport torch\nfrom torch import Tensor\n{block}", names)
    if page == "new-advantage":
        import torch

        result = names["below_the_best"](torch.tensor([1.0, 3.0, 2.0, 5.0]), torch.tensor([0, 0, 0, 7]))
        assert result.tolist() == [-2.0, 0.0, -1.0, 0.0]
    else:
        assert names["new"].grad.item() == -0.125


# --- the built site -------------------------------------------------------------------------------


def test_resources_of_other_hosts_are_refused(tmp_path):
    with pytest.raises(ValueError, match="has no pages"):
        pages.check_site(tmp_path)
    page, style = tmp_path / "index.html", tmp_path / "site.css"
    page.write_text('<a href="https://x.y">x</a><script src="assets/a.js"></script><img src="a.png">')
    style.write_text("body { background: url(a.png) }")
    pages.check_site(tmp_path)
    page.write_text('<script async src="https://cdn.z/a.js"></script><link rel=stylesheet href=//fonts.z/b.css>')
    style.write_text("@import 'https://c.z/c.css'; body { background: url(\"http://d.z/d.png\") }")
    with pytest.raises(ValueError, match=r"4 resources .*cdn\.z.*fonts\.z.*c\.z.*d\.z"):
        pages.check_site(tmp_path)


def test_the_reference_is_printed():
    command = [sys.executable, "-m", "tools.docs.configuration"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == reference()
