"""`megarlhf completion SHELL`: a script by which a shell completes commands, options, keys and values.

The script holds all words itself, so that a Tab starts no process. Keys are completed section by section:
`actor.<Tab>` shows the keys below it, `actor.model.dtype=<Tab>` the values.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from megarlhf.commands.arguments.parser import Parser
from megarlhf.config.frozen import FrozenModel
from megarlhf.config.reference import all_paths

SHELLS = ("bash", "zsh", "fish")
HELP = """For the shell that is open, and for all later ones:

  bash   source <(megarlhf completion bash)
         megarlhf completion bash > ~/.local/share/bash-completion/completions/megarlhf
  zsh    source <(megarlhf completion zsh)
         megarlhf completion zsh > "${fpath[1]}/_megarlhf"
  fish   megarlhf completion fish | source
         megarlhf completion fish > ~/.config/fish/completions/megarlhf.fish

Make it again after an update of megarlhf."""
_OPTIONS = ("-h", "--help", "--version")
"""Options before a command."""


@dataclass(frozen=True)
class Words:
    """Words that may follow a command."""

    description: str
    options: tuple[str, ...]
    """Options, and plain words such as a command of the command."""
    keys: tuple[str, ...]
    """`actor.model.dtype=`"""
    values: tuple[str, ...]
    """`actor.model.dtype=bf16`"""


def script(shell: str, root: Parser, parsers: Mapping[str, Parser], configs: Mapping[str, type[FrozenModel]]) -> str:
    """The script of a shell.

    root:    the parser of all commands
    parsers: parsers of commands that have one of their own
    configs: configuration class of each command that reads one
    """
    commands: Mapping[str, Parser] = root.get_default("commands")
    (sub,) = (action for action in root._actions if isinstance(action, argparse._SubParsersAction))
    helps = {choice.dest: choice.help or "" for choice in sub._choices_actions}
    words = {
        name: _words(name, helps.get(name, ""), parsers.get(name, parser), configs) for name, parser in commands.items()
    }
    return _fish(words) if shell == "fish" else _filled({"bash": _BASH, "zsh": _ZSH}[shell], words)


def _words(name: str, description: str, parser: Parser, configs: Mapping[str, type[FrozenModel]]) -> Words:
    config = configs.get("rl" if name == "plan" else name)
    paths = {} if config is None else {path: key for path, key in all_paths(config).items() if "[]" not in path}
    words = [str(choice) for action in parser._actions if not action.option_strings for choice in action.choices or ()]
    return Words(
        description,
        options=tuple(dict.fromkeys([*parser.options(), *words, *(configs if name == "keys" else ())])),
        keys=tuple(f"{path}=" for path in paths),
        values=tuple(f"{path}={choice}" for path, key in paths.items() for choice in key.choices),
    )


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


def _filled(template: str, words: Mapping[str, Words]) -> str:
    """The template with the words in place of names between at-signs."""
    cases = []
    for name, of_command in words.items():
        arrays = {"options": of_command.options, "keys": of_command.keys, "values": of_command.values}
        lines = (f"            {array}=({shlex.join(values)})" for array, values in arrays.items())
        cases += [f"        {name})", *lines, "            ;;"]
    first = [*_OPTIONS] if template is _ZSH else [*words, *_OPTIONS]  # zsh has the commands with their descriptions
    for name, value in {
        "MATCHING": _MATCHING,
        "CASES": "\n".join(cases),
        "COMMANDS": "|".join(words),
        "FILES": _FILES,
        "FIRST": " ".join(first),
        "DESCRIBED": shlex.join(f"{name}:{of_command.description}" for name, of_command in words.items()),
    }.items():
        template = template.replace(f"@{name}@", value)
    return template


def _fish(words: Mapping[str, Words]) -> str:
    def quoted(text: str) -> str:
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

    lines = ["# fish completion of megarlhf, made by `megarlhf completion fish`", "complete -c megarlhf -e"]
    first = quoted(f"not __fish_seen_subcommand_from {' '.join(words)}")
    for name, of_command in words.items():
        lines.append(f"complete -c megarlhf -f -n {first} -a {quoted(name)} -d {quoted(of_command.description)}")
    lines.append(f"complete -c megarlhf -f -n {first} -a {quoted(' '.join(_OPTIONS))}")
    for name, of_command in words.items():
        seen = quoted(f"__fish_seen_subcommand_from {name}")
        for part in (of_command.options, of_command.keys, of_command.values):
            if part:
                lines.append(f"complete -c megarlhf -n {seen} -a {quoted(' '.join(part))}")
    return "\n".join(lines) + "\n"
