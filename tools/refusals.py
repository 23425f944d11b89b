"""Refusals that the program can say, before and after a change: none may get lost when sentences are rewritten.

    python -m tools.refusals OLD [--new COMMIT] [--pairs]          (make refusals OLD=COMMIT [NEW=COMMIT])

Texts are read from the sources: those of `raise` statements, notes, and parts of messages. What identifies one is what
it *names*: configuration keys, flags, commands, files, quoted values and numbers. A text of OLD that is not in NEW word
for word belongs to the text of NEW that has all its names and is most alike: in words (half of them where it names
nothing), or by the condition under which it is raised. Each text of NEW is taken once. What is left over is missing,
and so is a text with advice behind its last semicolon where the new one advises nothing. Exit status 1 unless
tools/refusals_gone.txt has a reason for each. Not seen: whether a condition was changed, and what `raise error` says.
"""

from __future__ import annotations

import argparse
import io
import math
import re
import subprocess
import sys
import tarfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tools.message_texts import PACKAGE, Sources, Text, names_in, words_in

ROOT = Path(__file__).parents[1]
GONE = ROOT / "tools" / "refusals_gone.txt"
"""Lines `WORD WORD: reason`. A text is meant to be gone where each word is its file or stands in the text."""
RENAMED: Mapping[str, str] = {
    "rollout.gpu_memory_utilization": "rollout.vllm.gpu_memory_utilization",
    "rollout.cpu_cache_gib": "rollout.vllm.cpu_cache_gib",
    "rollout.sleep_level": "rollout.vllm.sleep_level",
    "rollout.engine_args": "rollout.vllm.args",
}
"""Keys, commands and fields with another name since, `old: new`: applied to the texts of OLD."""
_ENOUGH, _ENOUGH_IN_PLACE, _NEARLY_ALL = 0.5, 0.25, 0.8
"""Share of a text's words, each with its weight, that another one must have: anywhere; with the same names; and to hold
a part of a message, although it has the place of another text already."""
_ALIKE = 0.6
"""Likeness of the places; and of texts that are neither in one place nor have the same names, so that two words are not
found again in a text of fifty."""
_ADVISES = re.compile(
    r"(?:[;:.,(]|\b(?:or|and|then|to|please)) (?:add|ask|call|change|check|choose|convert|copy|correct|cut|drop|export|"
    r"fix|give|install|leave|let|look|lower|make|move|name|pass|pick|put|raise|read|remove|rename|repair|replace|return|"
    r"run|save|see|set|shorten|start|take|train|try|turn|unset|use|wait|write)\b",
    re.IGNORECASE,
)
"""A clause that tells what to do."""


@dataclass(frozen=True)
class Pair:
    """An old text and a new one."""

    old: Text
    new: Text
    overlap: float
    """Share of the old text's words that the new one has, each with its weight."""
    of_words: float
    """The same of both texts' words."""
    place: float
    """Share of the words of conditions and functions' names that both have."""

    @property
    def likeness(self) -> float:
        """Of words on both sides, and a little of the place and the kind; above 1 where all is equal."""
        return self.of_words + (self.place + (self.old.kind == self.new.kind)) / 5

    @property
    def lost(self) -> list[str]:
        """Names of the old text that are not in the new one. A key may have gained or lost its section."""
        kept = [f".{name}" for name in self.new.names]
        return sorted(
            name
            for name in self.old.names
            if not any(new.endswith(f".{name}") or f".{name}".endswith(new) for new in kept)
        )

    @property
    def says_the_same(self) -> bool:
        """Whether the new text has the names, the advice, and enough of the words."""
        advice = words_in(self.old.text.rpartition(";")[2]) if ";" in self.old.text else set()
        if self.lost or (advice and not advice & self.new.words and not _ADVISES.search(self.new.text)):
            return False
        if self.in_place:
            return True
        if self.old.names == self.new.names != frozenset() and self.old.kind == self.new.kind:
            return self.overlap >= _ENOUGH_IN_PLACE
        return self.overlap >= _ENOUGH and self.likeness >= _ALIKE

    @property
    def in_place(self) -> bool:
        """Whether both are raised under much the same condition in functions of the same or a like name."""
        is_near = self.old.file == self.new.file or self.overlap >= _ENOUGH_IN_PLACE
        return is_near and self.old.kind == self.new.kind == "raise" and self.place >= _ALIKE


class _Index:
    """New texts by their words. A word that few texts have weighs more."""

    def __init__(self, texts: Sequence[Text]) -> None:
        self._texts = texts
        self._numbers, self._contexts = defaultdict(list), defaultdict(list)
        for number, text in enumerate(texts):
            self._contexts[text.context].append(number)
            for word in text.words:
                self._numbers[word].append(number)

    def _weight(self, words: Iterable[str]) -> float:
        return sum(math.log(1 + len(self._texts) / len(self._numbers.get(word, (0,)))) for word in words)

    def nearest(self, old: Text) -> list[Pair]:
        """Pairs with each text that has a word of the old one or its condition, the most alike first."""
        shared: dict[int, float] = dict.fromkeys(self._contexts.get(old.context, ()), 0.0)
        for word in old.words & self._numbers.keys():
            weight = self._weight([word])
            for number in self._numbers[word]:
                shared[number] = shared.get(number, 0.0) + weight
        whole, pairs = self._weight(old.words) or 1.0, []
        for number, weight in shared.items():
            new = self._texts[number]
            of_words = 2 * weight / (whole + self._weight(new.words))
            place = len(old.context & new.context) / (len(old.context | new.context) or 1)
            pairs.append(Pair(old, new, weight / whole, of_words, place))
        return sorted(pairs, key=lambda pair: -pair.likeness)


@dataclass(frozen=True)
class Comparison:
    """What became of the old texts, and which new ones are none of them."""

    same: list[Text]
    """In both word for word."""
    reworded: list[Pair]
    missing: list[tuple[Text, list[Pair]]]
    """Each with what comes nearest to it."""
    added: list[Text]


def compare(old: Sequence[Text], new: Sequence[Text]) -> Comparison:
    """Find for each old text the new one that says the same."""
    places: dict[str, list[Text]] = defaultdict(list)
    for text in reversed(new):
        places[text.text].append(text)
    same: list[Text] = []
    left: list[Text] = []
    for text in old:
        (same if places[text.text] and places[text.text].pop() else left).append(text)
    free = {id(text): text for texts in places.values() for text in texts}
    index = _Index(new)
    pairs = {id(text): index.nearest(text) for text in left}
    found: dict[int, Pair] = {}
    alike = [pair for near in pairs.values() for pair in near if id(pair.new) in free and pair.says_the_same]
    for pair in sorted(alike, key=lambda pair: (pair.old.names != pair.new.names, -pair.likeness)):
        if id(pair.old) not in found and id(pair.new) in free:
            found[id(pair.old)] = pair
            del free[id(pair.new)]
    for text in left:
        if text.kind == "part" and id(text) not in found:
            holds = [pair for pair in pairs[id(text)] if pair.overlap >= _NEARLY_ALL and pair.says_the_same]
            found |= {id(text): pair for pair in holds[:1]}
    missing = [(text, pairs[id(text)][:2]) for text in left if id(text) not in found]
    return Comparison(same, list(found.values()), missing, list(free.values()))


def sources_of(commit: str | None) -> Sources:
    """Sources of a commit, or of the working tree. Raises: ValueError for a commit that is not there."""
    if commit is None:
        files = sorted((ROOT / PACKAGE).rglob("*.py"))
        return Sources({str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in files})
    command = ["git", "archive", "--format=tar", commit, PACKAGE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if done.returncode:
        raise ValueError(f"git has no {PACKAGE}/ of {commit} ({done.stderr.decode().strip()}); name another commit")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as tar:
        members = {member.name: tar.extractfile(member) for member in tar if member.name.endswith(".py")}
        return Sources({name: file.read().decode() for name, file in members.items() if file is not None})


def compare_sources(old: Sources, new: Sources, renamed: Mapping[str, str] = RENAMED) -> Comparison:
    """Compare all texts of two trees."""
    keys = old.keys | new.keys
    texts = old.texts(keys)
    if renamed:
        form = re.compile("|".join(rf"(?<![\w-]){re.escape(name)}(?![\w-])" for name in renamed))
        changed = [form.sub(lambda match: renamed[match[0]], text.text) for text in texts]
        texts = [replace(text, text=t, names=names_in(t, keys)) for text, t in zip(texts, changed, strict=True)]
    return compare(texts, new.texts(keys))


def reasons_in(lines: Iterable[str]) -> list[tuple[list[str], str]]:
    """Words and reason of each line of tools/refusals_gone.txt; `#` begins a comment."""
    parts = [line.partition(": ") for line in lines if line.strip() and not line.startswith("#")]
    return [(words.split(), reason.strip()) for words, _, reason in parts]


def _counts(result: Comparison) -> str:
    """A table, with a line for each kind of text."""
    lines = [f"{'':6}{'same text':>11}{'same names':>12}{'alike':>7}{'missing':>9}{'added':>7}"]
    for kind in ("raise", "note", "part"):
        pairs = [pair.old.names == pair.new.names for pair in result.reworded if pair.old.kind == kind]
        num_same, num_added = (sum(text.kind == kind for text in texts) for texts in (result.same, result.added))
        num_missing = sum(text.kind == kind for text, _ in result.missing)
        lines.append(f"{kind:6}{num_same:11}{sum(pairs):12}{len(pairs) - sum(pairs):7}{num_missing:9}{num_added:7}")
    return "\n".join(lines)


def main(argv: Sequence[str] = ()) -> int:
    """Print the comparison."""
    parser = argparse.ArgumentParser("python -m tools.refusals", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("old", metavar="OLD", help="commit before the change")
    parser.add_argument("--new", metavar="COMMIT", help="commit after it; default: the working tree")
    parser.add_argument("--pairs", action="store_true", help="show what was reworded too, the least alike first")
    arguments = parser.parse_args(argv)
    try:
        result = compare_sources(sources_of(arguments.old), sources_of(arguments.new))
    except (ValueError, SyntaxError) as error:
        print(f"python -m tools.refusals: {error}", file=sys.stderr)
        return 2
    for pair in sorted(result.reworded, key=lambda pair: pair.likeness) if arguments.pairs else ():
        print(f"reworded ({pair.overlap:.0%} of the words)\n  {pair.old}\n  {pair.new}")
    reasons = reasons_in(GONE.read_text(encoding="utf-8").splitlines() if GONE.exists() else [])
    num_unexplained = 0
    for text, nearest in result.missing:
        whys = [why for words, why in reasons if all(word == text.file or word in text.text for word in words)]
        num_unexplained += not whys
        print("missing", *(f"(meant: {why})" for why in whys[:1]), f"\n  {text}")
        for pair in nearest:
            print(f"    nearest: {pair.new}" + (f"\n      it does not name {', '.join(pair.lost)}" * bool(pair.lost)))
    print(_counts(result))
    print(f"{len(result.missing)} missing, {num_unexplained} of them without a reason in {GONE.relative_to(ROOT)}")
    return 1 if num_unexplained else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
