"""Tools of the configuration with their descriptions, and what a run's workers are told about them."""

from __future__ import annotations

import functools
import inspect
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints, is_typeddict

import torch.distributed as dist

from megarlhf.collective_errors import from_first_rank, raise_on_all_ranks
from megarlhf.config.environment import EnvironmentConfig
from megarlhf.data.text.templates import ChatTemplate
from megarlhf.own_code.failures import describe_error
from megarlhf.own_code.load import load_function
from megarlhf.rollout.tools.forms import FORMS
from megarlhf.rollout.tools.forms.of_template import form_of
from megarlhf.rollout.tools.forms.vllm_parser import load_vllm_parser
from megarlhf.rollout.tools.start import ToolSource, ToolsStart

_RESULT_KEYS = ("name", "tool_call_id")
"""Keys of a result that only some templates read."""
_JSON_TYPES = (str, int, float, bool, list, tuple, dict, NoneType, Any, ...)
"""Types whose values a call can hold. transformers describes every other one as an object."""


def tool_descriptions(environment: EnvironmentConfig | None) -> list[Mapping[str, Any]]:
    """Descriptions of the tools of a run, for the chat template; none without tools.

    Raises: ValueError for a tool that cannot be described, and for two of one name.
    """
    if environment is None or not environment.tools:
        return []
    described = [description for source in sources_of(environment) for description in source.descriptions]
    names = Counter(description["function"]["name"] for description in described)
    if twice := [name for name, count in names.items() if count > 1]:
        raise ValueError(
            f"environment.tools: {twice[0]!r} is the name of {names[twice[0]]} tools, and a call has nothing but the "
            "name; rename a function, or choose tools of a server (names)"
        )
    return described


def sources_of(environment: EnvironmentConfig) -> list[ToolSource]:
    """Tools of the configuration, each with its descriptions. A server is asked once in a process. Raises:
    ValueError."""
    specs = [tool.model_dump(mode="json", exclude_none=True) for tool in environment.tools]
    described = json.loads(_described(json.dumps(specs, sort_keys=True)))
    return [ToolSource(spec, parts) for spec, parts in zip(specs, described, strict=True)]


def require_same_on_all_ranks(descriptions: Sequence[Mapping[str, Any]]) -> None:
    """Collective. Raises: ValueError, on every rank, where a rank has other descriptions than the first one."""
    first = from_first_rank(list(descriptions))
    with raise_on_all_ranks(lambda reasons: ValueError(reasons[0])) as problems:
        if list(descriptions) != first:
            problems.append(
                f"environment.tools: rank {dist.get_rank()} has other descriptions of the tools than rank 0; let "
                "functions and servers describe themselves alike on every node"
            )


@functools.lru_cache(maxsize=4)
def _described(specs: str) -> str:
    """Descriptions of each tool's functions, as JSON. `specs`: JSON. Raises: ValueError."""
    described = []
    for number, spec in enumerate(json.loads(specs)):
        try:
            described.append(_descriptions(spec))
        except ValueError as error:
            raise ValueError(f"environment.tools[{number}]: {error}") from error
    return json.dumps(described)


def _descriptions(spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    if "function" in spec:
        return [describe_function(spec["function"])]
    if "python" in spec:
        from megarlhf.rollout.tools.python.limits import PythonLimits, describe_python

        return [describe_python(PythonLimits(**spec["python"]))]
    from megarlhf.rollout.tools.mcp_servers import McpServer

    server = McpServer(spec, seconds=60.0)
    try:
        return server.start()
    finally:
        server.close()


def describe_function(path: str) -> dict[str, Any]:
    """Description of a user's function, by transformers' `get_json_schema` from its signature and docstring.

    Raises: ValueError for something else than a function, for one that cannot be called by the names of its
    parameters, and for one without a docstring or without types.
    """
    from transformers.utils import get_json_schema

    function = load_function(path, "tool")
    label = f"tool {path!r}"
    if not inspect.isroutine(function) or inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        kind = "a generator" if inspect.isroutine(function) else f"an object of {type(function).__name__}"
        raise ValueError(f"{label} is {kind}, expected a function, def or async def, that returns its result")
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.name in ("self", "cls") for parameter in parameters):
        raise ValueError(f"{label} is a method without its object; name a function, or a method of an object")
    if wrong := [str(parameter) for parameter in parameters if parameter.kind in by_place]:
        raise ValueError(
            f"{label} has the parameter {wrong[0]}; a model gives each argument by its name: give it parameters that "
            "have names"
        )
    try:
        shown = _without_result_type(function)
        hints = get_type_hints(shown)
        described: dict[str, Any] = json.loads(json.dumps(get_json_schema(shown)))
    except Exception as error:  # of transformers, or of a type hint of the user's
        raise ValueError(
            f"{label} cannot be described: {describe_error(error)}; give it a docstring with a sentence and a line for "
            "each parameter under `Args:`, and types of parameters"
        ) from error
    for name in described["function"]["parameters"]["properties"]:
        if (kind := _foreign_type(hints[name])) is not None:
            raise ValueError(
                f"{label}: the parameter {name} is of the type {getattr(kind, '__name__', kind)}, which a call cannot "
                "hold; take str, int, float, bool, list, dict or Literal, and build the value in the function"
            )
    described["function"].pop("return", None)
    return described


def _without_result_type(function: Any) -> Any:
    """A stand-in for transformers, which refuses some types of results. A model sees none of them."""
    shown = functools.update_wrapper(lambda: None, function)
    shown.__annotations__ = {name: hint for name, hint in shown.__annotations__.items() if name != "return"}
    return shown


def _foreign_type(hint: Any) -> Any:
    """A type in a hint that JSON does not have; None if there is none."""
    if get_origin(hint) is Literal or is_typeddict(hint):
        return None
    if arguments := get_args(hint):
        return next((kind for part in arguments if (kind := _foreign_type(part)) is not None), None)
    return None if hint in _JSON_TYPES else hint


def missing_protection(environment: EnvironmentConfig) -> list[str]:
    """Sentences on what the system does not enforce for the Python tool; none without it."""
    if all(tool.kind != "python" for tool in environment.tools):
        return []
    from megarlhf.rollout.tools.python.tool import missing_protection as missing

    return [f"The Python tool is not fully enclosed on this machine: {sentence}." for sentence in missing()]


def form_of_calls(parser: str, template: ChatTemplate, tokenizer: Path) -> str:
    """The form in which calls are read: `parser`, or what the template writes. `tokenizer`: its directory, which
    parsers of vLLM load. Raises: ValueError."""
    if parser.startswith("vllm:"):
        try:
            load_vllm_parser(parser.removeprefix("vllm:"), tokenizer)
        except ValueError as error:
            raise ValueError(f"environment.parser = {parser}: {error}") from error
    if parser in FORMS or parser.startswith("vllm:"):
        return parser
    known = f"{', '.join(FORMS)}, or vllm:NAME for a parser of vLLM"
    if parser != "auto":
        raise ValueError(f"environment.parser = {parser!r}, expected auto, {known}")
    if (form := form_of(template)) is None:
        raise ValueError(
            "environment.parser = auto: the chat template writes no calls of tools in a form that is known; name the "
            f"form in which the model calls (environment.parser: {known}), or give a template that writes calls "
            "(data.chat_template)"
        )
    return form


def tools_start(environment: EnvironmentConfig, template: ChatTemplate, tokenizer: Path) -> ToolsStart:
    """Message to the workers. Raises: ValueError."""
    texts = template.tokenizer.tokens()
    return ToolsStart(
        sources_of(environment),
        form=form_of_calls(environment.parser, template, tokenizer),
        tokenizer=str(tokenizer),
        special=[texts[token] for token in sorted(template.tokenizer.special_ids) if token < len(texts)],
        keys=[key for key in _RESULT_KEYS if template.program.names(key)],
        seconds=environment.seconds_per_step,
        max_characters=environment.max_result_characters,
    )
