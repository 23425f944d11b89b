"""What the pages name exists: files, functions, words of the code, commands; what they quote is said; examples run."""

import ast
import itertools
import re
from functools import cache
from pathlib import Path

import pytest

from megarlhf.commands import cli
from megarlhf.commands.convert_arguments import parser as convert_parser
from tests.docs.repository import PRESENT, ROOT, code, files, path_of, text

_PATH = re.compile(r"(?<![\w./{*-])([\w./-]+(?:\.py|\.yaml|\.sbatch|\.md|/))(?:::([\w.]+))?(?![\w*{.])")
NOT_OURS = {
    "vllm/model_executor/models/", "gpt_layer_specs.py", "my_rules.py", "tests/distributed/test_sum.py", "sft.yaml",
    "chat.yaml", "config.yaml", "best.yaml", "perplexity.yaml", "pairs.yaml", "versus.yaml", "hf/", "runs/", "data/",
    "tensorboard/", "checkpoints/", "bank/", "profile/", "samples/", "wandb/", "failures/", "config.1.yaml",
    "config.2.yaml", "release/", "docs/benchmarks/gpu-logprob.md",
}  # fmt: skip
"""Other projects' sources, what a reader has or is shown how to write, and what a benchmark makes."""
SOURCES_OF_KERNELS = {
    "torch/nn/attention/varlen.py", "tensor_parallel/layers.py", "transformer/moe/moe_utils.py",
    "pytorch/attention/dot_product_attention/utils.py", "flash_attn_interface.py",
    "v1/attention/backends/flash_attn.py", "fa_utils.py", "model_executor/determinism/batch_invariant.py",
    "distributed/device_communicators/cuda_communicator.py", "model_executor/layers/fused_moe/fused_moe.py",
}  # fmt: skip
"""Other projects' files, which docs/determinism.md cites."""


OTHERS = ("trl/", "verl/", "openrlhf/", "vllm/", "platform_manager.py")
"""Other projects' packages, whose files docs/benchmarks/trl.md cites."""
ELSEWHERE = ("runs/", "/", "checkpoints/", "build/", *OTHERS)


def unknown_names(spans: list[str]) -> list[str]:
    """Paths of ours that do not exist, and `file.py::name` whose file has no such name."""
    unknown = []
    for span in spans:
        for path, name in _PATH.findall(span):
            if path in NOT_OURS | SOURCES_OF_KERNELS or path.startswith(ELSEWHERE):
                continue
            ends = f"/{path.removeprefix('./')}"
            hits = [file for file in files() if (ends in file if path.endswith("/") else file.endswith(ends))]
            if not hits or (name and not any(defines(ROOT / file[1:], name) for file in hits)):
                unknown.append(f"{path}::{name}" if name else path)
    return unknown


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


@pytest.mark.parametrize("page", PRESENT, ids=path_of)
def test_files_and_functions_exist(page):
    assert unknown_names(code(page)) == []


def test_an_unknown_name_is_found():
    spans = ["trainers/rl/loop.py::run", "trainers/rl/loop.py::walk", "rollout/vllm/engine.py::VllmEngine.generate"]
    spans += ["rollout/vllm/engine.py::VllmEngine.sing", "trainers/nothing.py", "architectures/families/", "cellar/"]
    assert unknown_names(spans) == [
        "trainers/rl/loop.py::walk", "rollout/vllm/engine.py::VllmEngine.sing", "trainers/nothing.py", "cellar/"
    ]  # fmt: skip


@cache
def words() -> set[str]:
    """Every word of the code, of its configuration and of its lists of packages."""
    kinds = (".py", ".yaml", ".sbatch", ".toml", ".txt", "/Makefile", ".ci/run")
    read = [file for file in files() if file.endswith(kinds) and not file.startswith("/tests/docs/")]
    return {word for file in read for word in re.findall(r"\w+", text(ROOT / file[1:]))}


@cache
def members() -> dict[str, set[str]]:
    """The methods and fields of each class of the package."""
    members_of: dict[str, set[str]] = {}
    for file in (ROOT / "megarlhf").rglob("*.py"):
        for node in ast.walk(ast.parse(text(file))):
            if isinstance(node, ast.ClassDef):
                bound = [getattr(inner, "name", None) or getattr(inner, "target", None) for inner in node.body]
                members_of.setdefault(node.name, set()).update(
                    getattr(member, "id", member) for member in bound if member
                )
    return members_of


def unknown_words(spans: list[str]) -> list[str]:
    """Names in the style of code that the code does not have, and `Class.member` without that class or member."""
    unknown = []
    for span in spans:
        if not re.fullmatch(r"[A-Za-z_][\w.]*\w", span) or span.endswith((".py", ".md")):
            continue
        parts = span.split(".")
        unheard = any(("_" in part or re.search(r"[A-Z].*[a-z]", part)) and part not in words() for part in parts)
        is_member = len(parts) == 2 and re.match(r"[A-Z][a-z]", span)
        if unheard or (is_member and parts[1] not in members().get(parts[0], ())):
            unknown.append(span)
    return [span for span in unknown if span not in OTHERS_WORDS]


OTHERS_WORDS = {"account_for_embedding_in_pipeline_split", "scatter_add", "mp_rank_TT_EEE", "ChildFailedError"}
OTHERS_WORDS |= {"FileSystemWriterAsync", "rank_RRRRR", "KillWait"}
OTHERS_WORDS |= {"_flash_attention_backward", "_efficient_attention_backward", "num_splits_key", "num_splits"}
OTHERS_WORDS |= {"check_cudnn_deterministic", "alertNotDeterministic", "put_", "index_put_", "get_attention_backend"}
OTHERS_WORDS |= {"NCCL_TOPO_FILE", "ProcessGroupNCCL.cpp", "VocabParallelEmbedding.forward"}
OTHERS_WORDS |= {"topk_routing_with_score_function", "seq_aux_loss", "global_aux_loss"}
OTHERS_WORDS |= {"fused_single_qkv_rope", "moe_router_fusion", "sync_weights", "auto_set_device"}
"""Of Megatron-LM, torch, NCCL, TransformerEngine, vLLM, TRL, verl and Slurm, and patterns of names, said in the
documentation only."""


@pytest.mark.parametrize("page", PRESENT, ids=path_of)
def test_words_of_the_code_are_in_the_code(page):
    outside = re.sub(r"^```.*?^```$", "", text(page), flags=re.MULTILINE | re.DOTALL)
    assert unknown_words(re.findall(r"`([^`\n]+)`", outside)) == []


def test_an_unknown_word_is_found():
    spans = ["AlgoConfig.needs_critic", "AlgoConfig.needs_nothing", "Nobody.runs", "old_logprobs", "older_logprobs"]
    assert unknown_words([*spans, "RLConfig", "RLConfiguration", "plain", "a b_c"]) == [
        "AlgoConfig.needs_nothing", "Nobody.runs", "older_logprobs", "RLConfiguration"
    ]  # fmt: skip


def commands() -> set[str]:
    return set(cli.parser()._subparsers._group_actions[0].choices)  # type: ignore[union-attr]


def test_commands_exist():
    """`megarlhf COMMAND`, `megarlhf convert COMMAND` and `make TARGET`."""
    spans = list(itertools.chain.from_iterable(map(code, PRESENT)))
    lines = [line.split("#")[0] for span in spans for line in span.splitlines()]
    named = {command for line in lines for command in re.findall(r"(?:^|-m |&& )megarlhf ([a-z][a-z-]*)", line.strip())}
    assert named >= {"sft", "rm", "dpo", "rl", "generate", "eval", "plan", "report", "doctor", "convert"}, "not read"
    assert named <= commands()
    conversions = {f for line in lines for f in re.findall(r"(?:megarlhf convert|checkpoint_convert) ([a-z-]+)", line)}
    assert conversions >= {"hf-to-megatron", "inspect"}
    assert conversions <= set(convert_parser("x")._subparsers._group_actions[0].choices)  # type: ignore[union-attr]
    targets = {target for line in lines for target in re.findall(r"(?:^|\s)make ([a-z0-9-]+)", line)}
    assert targets >= {"demo", "test", "docs"}
    assert targets <= set(re.findall(r"^([a-z0-9-]+):", text(ROOT / "Makefile"), re.MULTILINE))


# --- what is quoted and counted -------------------------------------------------------------------


@cache
def messages() -> str:
    """Every text of the package, the converter of GGUF files and the Makefile; where a value goes into one, a gap."""
    texts = [text(ROOT / "Makefile").replace('" \\\n\t\t"', "")]
    for file in (*(ROOT / "megarlhf").rglob("*.py"), *(ROOT / "tools" / "gguf_to_hf").glob("*.py")):
        for node in ast.walk(ast.parse(text(file))):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(str(v.value) if isinstance(v, ast.Constant) else "\0" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


def test_quoted_messages_are_said():
    """The left column of the tables of refusals quotes the code."""
    rows = re.findall(r"^\| (`[^|]+`) \|", text(ROOT / "docs" / "refusals.md"), re.MULTILINE)
    quoted = [quote for row in rows for quote in re.findall(r"`([^`]+)`", row)]
    assert len(quoted) > 20
    assert [quote for quote in quoted if quote not in messages()] == []


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
