"""Messages as they are written in the sources of the package: texts of `raise`, of notes, and parts of such texts."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

PACKAGE = "megarlhf"
_Function = ast.FunctionDef | ast.AsyncFunctionDef
GAP = "§"
"""Stands in a text for what is known only at run time."""
_OURS = {"AssertionError", "StopIteration"}
"""Exceptions that are no refusals."""
_NOTES = re.compile(r"(^|\b|_)(notes?|warnings?|warn|print|say|log\.\w+)\b")
"""What is called with a note, or what notes are added to."""
_NAMES = re.compile(
    r"(?<![\w-])--[a-z][\w-]+"  # a flag
    rf"|`(?P<ticks>[^`{GAP}]+)`|(?<!\w)'(?P<quoted>[^'{GAP}\n]{{1,40}})'(?!\w)"
    rf"|\b{PACKAGE} [a-z][a-z-]+|\bmake (?:[a-z]+-[a-z-]+|venv|demo|docs)\b|\b(?:pip|apt-get) install [\w-]+"
    rf"|(?:\b[A-Za-z_][\w/-]*\w|{GAP})(?:\.[A-Za-z_]\w+)+"  # a key, a module, a file
    r"|\b\w*[a-zA-Z0-9]_\w+"  # a key without its section, a field of a record, a variable of the environment
    r"|\b(?P<key>[a-z]+)(?= ?=|: [\[{]|: \w+(?:[,;)}\]]|$))"
    r"|(?<![\w.])(?:\d[\d.,]*\d|[2-9])(?!\w)"
)
_COMMON = frozenset(
    re.findall(
        r"\w+",
        "the and for that this with which would are not has have was were from its their they them than then there "
        "what where when but all one two any each only into out other another can cannot must may will got expected "
        "give does did been being also nor use set say said such some these those more most both how who whose",
    )
)


@dataclass(frozen=True)
class Text:
    """A message as it is written in the sources."""

    file: str
    line: int
    kind: str
    """`raise`; `note` of what is logged or printed; `part` of a message that is put together elsewhere."""
    text: str
    names: frozenset[str]
    context: frozenset[str]
    """Words of the condition under which it is said, and of the function's name."""

    @cached_property
    def words(self) -> frozenset[str]:
        """Beginnings of the words that carry meaning."""
        return words_in(self.text)

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.kind}): {self.text.replace(GAP, '{}')}"


def words_in(text: str) -> frozenset[str]:
    """Five letters of each word that carries meaning, without an s at the end: `named` counts as `names`."""
    words = re.findall(r"[a-z0-9]{3,}", text.lower())
    return frozenset(word.rstrip("s")[:5] for word in words if word not in _COMMON)


def names_in(text: str, keys: Collection[str]) -> frozenset[str]:
    """What a text names. keys: configuration keys without their sections, which count before `:` and `=`."""
    found = set()
    for match in _NAMES.finditer(text):
        name = match["ticks"] or match["quoted"] or match[0]
        if (match["key"] is None or name in keys) and not name.endswith(".py"):  # modules are moved
            found.add(name.strip(f"{GAP} ."))
    return frozenset(found)


class Sources:
    """The package's modules, and what names stand for in them."""

    def __init__(self, files: Mapping[str, str]) -> None:
        """files: text of each Python file by its path."""
        self._trees = {file: ast.parse(text) for file, text in sorted(files.items())}
        self._functions: dict[str, list[tuple[str, _Function]]] = defaultdict(list)
        self._constants: dict[str, str] = {}
        self._variables: dict[ast.AST, dict[str, list[ast.expr]]] = {}
        self.keys: set[str] = set()
        """Fields of the configuration's classes."""
        for file, tree in self._trees.items():
            for node in _statements(tree):
                if isinstance(node, _Function):
                    self._functions[node.name].append((file, node))
                elif isinstance(node, ast.ClassDef) and "config" in file:
                    fields = (each.target for each in node.body if isinstance(each, ast.AnnAssign))
                    self.keys.update(field.id for field in fields if isinstance(field, ast.Name))
            for name, value in _assigned(tree.body):
                if name.isupper() and isinstance(value, ast.Constant) and isinstance(value.value, str):
                    is_other = self._constants.setdefault(name, value.value) != value.value
                    self._constants[name] = GAP if is_other else value.value

    def texts(self, keys: Collection[str]) -> list[Text]:
        """Every message of the package. keys: as in `names_in`."""
        found = []
        for file, tree in self._trees.items():
            visitor = _Messages(file, self, keys)
            visitor.visit(tree)
            found += visitor.texts
        return found

    def text_of(self, node: ast.AST | None, function: ast.AST | None, depth: int = 3) -> str:
        """The text of an expression, with a gap for each part that is no text in the sources. A variable of the
        function is the text that is assigned to it."""

        def joined(nodes: Iterable[ast.AST | None], between: str = " ") -> str:
            return between.join(self.text_of(each, function, depth) for each in nodes)

        match node:
            case ast.Constant(value=str(value)):
                return value.replace(GAP, "")
            case ast.JoinedStr(values=values):
                return joined(values, "")
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return joined([left, right], "")
            case ast.BoolOp(values=nodes) | ast.List(elts=nodes) | ast.Tuple(elts=nodes):
                return joined(nodes)
            case ast.Subscript(value=ast.Dict(values=nodes)):
                return joined(nodes)
            case ast.IfExp(body=body, orelse=orelse):
                return joined([body, orelse])
            case (
                ast.FormattedValue(value=inner) | ast.ListComp(elt=inner) | ast.GeneratorExp(elt=inner)
                | ast.Starred(value=inner) | ast.BinOp(left=inner, op=ast.Mod() | ast.Mult())
                | ast.Call(func=ast.Attribute(attr="join"), args=[inner])
                | ast.Call(func=ast.Attribute(value=inner, attr="format" | "replace" | "strip" | "removeprefix"))
            ):  # fmt: skip
                return self.text_of(inner, function, depth)
            case ast.Name(id=name) if name.isupper() and name in self._constants:
                return self._constants[name]
            case ast.Name(id=name) if depth and function is not None:
                texts = [self.text_of(value, function, depth - 1) for value in self._values(name, function)]
                return " ".join(texts) if re.search("[a-z]{3}", "".join(texts)) else GAP
        return GAP

    def said_by(self, call: ast.AST, function: ast.AST | None, file: str, depth: int = 3) -> str:
        """Texts of the functions that an expression calls, by name or by a variable that it reads; of several with one
        name, the one of the same file."""
        found: dict[str, None] = {}
        for node in ast.walk(call) if depth else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
                helpers = sorted(self._functions.get(name, []), key=lambda each: each[0] != file)
                for place, helper in helpers[:1]:
                    if place == file or len(helpers) == 1:
                        said = _Messages(file, self, ()).of_function(helper)
                        found |= {text.text: None for text in said if text.kind != "raise"}
            elif isinstance(node, ast.Name) and function is not None:
                values = self._values(node.id, function)
                found |= {self.said_by(value, function, file, depth - 1): None for value in values}
        return " ".join(filter(None, found))

    def _values(self, name: str, function: ast.AST) -> list[ast.expr]:
        """What is assigned to a variable of a function."""
        if function not in self._variables:
            variables = self._variables[function] = defaultdict(list)
            for target, value in _assigned(ast.walk(function)):
                variables[target].append(value)
        return self._variables[function].get(name, [])


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """All statements, of all depths."""
    for field in ("body", "orelse", "handlers", "finalbody", "cases"):
        for child in getattr(node, field, ()):
            if isinstance(child, ast.stmt):
                yield child
            yield from _statements(child)


def _assigned(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
    """Names, each with what is assigned to it."""
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) | ast.AugAssign(ast.Name(id=name), value=value):
                yield name, value
            case ast.NamedExpr(ast.Name(id=name), value) | ast.AnnAssign(ast.Name(id=name), value=ast.expr() as value):
                yield name, value
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                pairs = zip(names, values, strict=False)
                yield from ((name.id, value) for name, value in pairs if isinstance(name, ast.Name))


class _Messages(ast.NodeVisitor):
    """Collects the texts of a file. Docstrings, help texts and assertions are left out."""

    def __init__(self, file: str, sources: Sources, keys: Collection[str]) -> None:
        self.texts: list[Text] = []
        self._file, self._sources, self._keys = file, sources, keys
        self._function: _Function | None = None
        self._condition: ast.AST | None = None
        self._is_note = False

    def of_function(self, function: _Function) -> list[Text]:
        """The texts of one function."""
        self.visit_FunctionDef(function)
        return self.texts

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):
            self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> None: ...

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg not in ("help", "description", "epilog", "metavar"):
            self.generic_visit(node)

    def visit_FunctionDef(self, node: _Function) -> None:
        outer = self._function, self._condition
        self._function, self._condition = node, None
        for child in node.body:
            self.visit(child)
        self._function, self._condition = outer

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        outer, self._condition = self._condition, node.test
        for child in node.body + node.orelse:
            self.visit(child)
        self._condition = outer

    def visit_Call(self, node: ast.Call) -> None:
        self._visit_inside(node, node.func)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._visit_inside(node, node.target)

    def _visit_inside(self, node: ast.AST, name: ast.expr) -> None:
        outer = self._is_note
        self._is_note |= bool(_NOTES.search(ast.unparse(name)))
        self.generic_visit(node)
        self._is_note = outer

    def visit_Raise(self, node: ast.Raise) -> None:
        call = node.exc
        if isinstance(call, ast.Call) and ast.unparse(call.func) not in _OURS:
            parts = [*call.args, *(keyword.value for keyword in call.keywords)]
            text = " ".join(self._sources.text_of(part, self._function) for part in parts)
            if not re.search("[a-z]{3}", text):
                text = self._sources.said_by(call, self._function, self._file)
            if text:
                self._add("raise", node, text)

    def generic_visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
            text = self._sources.text_of(node, self._function)
            if len(re.findall("[A-Za-z]{2,}", text)) >= 3 and " " in text.strip():
                return self._add("note" if self._is_note else "part", node, text)
        super().generic_visit(node)

    def _add(self, kind: str, node: ast.AST, text: str) -> None:
        is_file = kind == "part" and text.count("\n") > 3  # a script, or a style sheet
        text = " ".join(text.split())
        names = names_in(text, self._keys)
        if is_file or (kind == "part" and not names and "; " not in text):  # or a label, or a title of a page
            return
        where = self._function.name if self._function else ""
        if self._condition is not None:
            where += " " + ast.unparse(self._condition)
        line = getattr(node, "lineno", 0)
        self.texts.append(Text(self._file, line, kind, text, names, words_in(where.replace("_", " "))))
