"""`megarlhf completion SHELL`: a script by which a shell completes commands, options, keys and what they may say.

The script holds all words itself, so that a Tab starts no process; it is made again after an update of megarlhf. Keys
are completed section by section: `actor.<Tab>` shows what stands below it, `actor.model.dtype=<Tab>` what it may say.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from megarlhf.commands.arguments.parser import Parser
from megarlhf.config.frozen import FrozenModel
from megarlhf.config.reference import all_paths


@dataclass(frozen=True)
class Words:
    """What may stand behind a command."""

    options: tuple[str, ...]
    keys: tuple[str, ...]
    """`actor.model.dtype=`"""
    values: tuple[str, ...]
    """`actor.model.dtype=bf16`"""
    words: tuple[str, ...] = ()
    """Plain words, such as a command of the command."""


def script(shell: str, root: Parser, parsers: Mapping[str, Parser], configs: Mapping[str, type[FrozenModel]]) -> str:
    """The script of a shell.

    root: the parser of all commands; parsers: those of commands that have one of their own; configs: what commands read
    """
    commands: Mapping[str, Parser] = root.get_default("commands")
    helps = _helps(root)
    words = {name: _words(name, parsers.get(name, parser), configs) for name, parser in commands.items()}
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](words, helps, ("-h", "--help", "--version"))


def _words(name: str, parser: Parser, configs: Mapping[str, type[FrozenModel]]) -> Words:
    read = {"plan": "rl"}.get(name, name)
    config = configs.get(read)
    paths = {} if config is None else {path: key for path, key in all_paths(config).items() if "[]" not in path}
    words = [str(choice) for action in parser._actions if not action.option_strings for choice in action.choices or ()]
    if name == "keys":
        words += configs
    return Words(
        options=tuple(parser.options()),
        keys=tuple(f"{path}=" for path in paths),
        values=tuple(f"{path}={choice}" for path, key in paths.items() for choice in key.choices),
        words=tuple(dict.fromkeys(words)),
    )


def _helps(root: Parser) -> dict[str, str]:
    (sub,) = (action for action in root._actions if isinstance(action, argparse._SubParsersAction))
    return {choice.dest: choice.help or "" for choice in sub._choices_actions}


# --- the shells ------------------------------------------------------------------------------------

_FILES = "-c|--config|-o|--out|--hf|--megatron|--hardware|--margin|--reference-hf|--model|--data"
"""Options whose value is a file."""

_MATCHING = """# The words that begin with the first argument, keys only up to their next dot.
_megarlhf_matching() {
    local current="$1" word rest; shift
    for word in "$@"; do
        [[ "$word" == "$current"* ]] || continue
        rest="${word#"$current"}"
        if [[ "$word" == -* || "$word" == *=?* || "$rest" != *.* ]]; then
            printf '%s\\n' "$word"
        else
            printf '%s\\n' "$current${rest%%.*}."
        fi
    done | sort -u
}"""

_BASH = """# bash completion of megarlhf, made by `megarlhf completion bash`
@MATCHING@

_megarlhf() {
    # bash breaks words at =, which keys have: they are read from the line itself.
    local line="${COMP_LINE:0:COMP_POINT}" current command="" word
    local -a typed options keys values found
    read -ra typed <<< "$line"
    current="${typed[-1]}"
    if [[ "$line" == *" " ]]; then current=""; else unset "typed[-1]"; fi
    for word in "${typed[@]:1}"; do
        case "$word" in @COMMANDS@) command="$word"; break ;; esac
    done
    case "$command" in
@CASES@
        *) options=(@FIRST@); keys=(); values=() ;;
    esac
    case "${typed[-1]}" in @FILES@)
        mapfile -t COMPREPLY < <(compgen -f -- "$current")
        compopt -o filenames
        return ;;
    esac
    if [[ "$current" == *=* ]]; then
        mapfile -t found < <(_megarlhf_matching "$current" "${values[@]}")
        if (( ${#found[@]} == 0 )); then
            mapfile -t found < <(compgen -f -P "${current%%=*}=" -- "${current#*=}")
        fi
        [[ "$COMP_WORDBREAKS" == *=* ]] && found=("${found[@]#*=}")
    else
        mapfile -t found < <(_megarlhf_matching "$current" "${options[@]}" "${keys[@]}")
    fi
    COMPREPLY=("${found[@]}")
    [[ "${#found[@]}" == 1 && "${found[0]}" == *[.=] ]] && compopt -o nospace
    return 0
}
complete -F _megarlhf megarlhf
"""

_ZSH = """#compdef megarlhf
# zsh completion of megarlhf, made by `megarlhf completion zsh`
@MATCHING@

_megarlhf() {
    local current="$PREFIX" command="" word
    local -a options keys values found commands
    commands=(@DESCRIBED@)
    for word in "${(@)words[2,CURRENT-1]}"; do
        case "$word" in @COMMANDS@) command="$word"; break ;; esac
    done
    case "$command" in
@CASES@
        *) options=(@FIRST@); _describe command commands; compadd -- $options; return ;;
    esac
    case "${words[CURRENT-1]}" in @FILES@) _files; return ;; esac
    if [[ "$current" == *=* ]]; then
        found=("${(@f)$(_megarlhf_matching "$current" $values)}")
        if [[ -z "$found" ]]; then compset -P "*="; _files; else compadd -- $found; fi
    else
        found=("${(@f)$(_megarlhf_matching "$current" $options $keys)}")
        [[ -n "$found" ]] && compadd -S "" -- ${(M)found:#*[.=]} && compadd -- ${found:#*[.=]}
    fi
}
if [[ "$funcstack[1]" == _megarlhf ]]; then _megarlhf "$@"; else compdef _megarlhf megarlhf; fi
"""


def _cases(words: Mapping[str, Words]) -> list[str]:
    lines = []
    for name, of in words.items():
        lines.append(f"        {name})")
        for variable, values in (
            ("options", (*of.options, *of.words)),
            ("keys", of.keys),
            ("values", of.values),
        ):
            lines.append(f"            {variable}=({' '.join(shlex.quote(value) for value in values)})")
        lines.append("            ;;")
    return lines


def _bash(words: Mapping[str, Words], helps: Mapping[str, str], options: tuple[str, ...]) -> str:
    return _filled(_BASH, words, {"FIRST": " ".join([*words, *options])})


def _zsh(words: Mapping[str, Words], helps: Mapping[str, str], options: tuple[str, ...]) -> str:
    described = " ".join(shlex.quote(f"{name}:{helps.get(name, '')}") for name in words)
    return _filled(_ZSH, words, {"FIRST": " ".join(options), "DESCRIBED": described})


def _filled(template: str, words: Mapping[str, Words], further: Mapping[str, str]) -> str:
    """The template, its words between at-signs replaced."""
    values = {"MATCHING": _MATCHING, "CASES": "\n".join(_cases(words)), "COMMANDS": "|".join(words), "FILES": _FILES}
    for name, value in {**values, **further}.items():
        template = template.replace(f"@{name}@", value)
    return template


def _fish(words: Mapping[str, Words], helps: Mapping[str, str], options: tuple[str, ...]) -> str:
    def quoted(text: str) -> str:
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

    lines = ["# fish completion of megarlhf, made by `megarlhf completion fish`", "complete -c megarlhf -e"]
    first = f"not __fish_seen_subcommand_from {' '.join(words)}"
    for name in words:
        lines.append(f"complete -c megarlhf -f -n {quoted(first)} -a {quoted(name)} -d {quoted(helps.get(name, ''))}")
    lines.append(f"complete -c megarlhf -f -n {quoted(first)} -a {quoted(' '.join(options))}")
    for name, of in words.items():
        seen = quoted(f"__fish_seen_subcommand_from {name}")
        lines.append(f"complete -c megarlhf -n {seen} -a {quoted(' '.join((*of.options, *of.words)))}")
        for part in (of.keys, of.values):
            if part:
                lines.append(f"complete -c megarlhf -n {seen} -a {quoted(' '.join(part))}")
    return "\n".join(lines) + "\n"
