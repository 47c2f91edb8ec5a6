"""Puts what some names of a package need into one source file that imports nothing of it.

A model that `transformers` loads with `trust_remote_code` brings its code along in one file. This
makes it from the package's own modules, so that there is no second copy to keep: definitions are
taken as they stand, comments included, and imports between the modules fall away.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from importlib import import_module

Name = tuple[str, str]
"""Module and name."""


@dataclass
class Definition:
    """A statement at a module's top.

    Attributes:
        text: its source, with the comments before it and the docstring after it.
        uses: the names that it reads, of whatever scope.
    """

    text: str
    uses: set[str]


@dataclass
class Module:
    """A module, taken apart.

    Attributes:
        definitions: by name, in the order of the source.
        inside: what it imports from the package, by name.
        outside: what it imports from elsewhere: statement by name.
    """

    definitions: dict[str, Definition] = field(default_factory=dict)
    inside: dict[str, Name] = field(default_factory=dict)
    outside: dict[str, str] = field(default_factory=dict)


def bundle(roots: list[Name], also: Iterable[str] = ()) -> str:
    """One file with some definitions and all that they need.

    Args:
        roots: module and name of each wanted definition, all of one package.
        also: further imports, a statement a name, that what is added at the end needs.

    Returns:
        Source that begins with its imports; what is needed comes before what needs it.

    Raises:
        ValueError: for a module that cannot be put together with others: one that renames what it
            imports from the package, or a name that means two things.
    """
    needed, imports, order = _needed(roots)
    texts = [
        definition.text
        for module in order
        for name, definition in _read(module).definitions.items()
        if (module, name) in needed
    ]
    # A statement that binds several names is needed once.
    return "\n\n\n".join([_import_block(imports | set(also)), *dict.fromkeys(texts)]) + "\n"


@functools.cache
def _read(name: str) -> Module:
    """Takes a module apart."""
    source = inspect.getsource(import_module(name))
    parts, lines, end = Module(), source.splitlines(), 0
    body = ast.parse(source).body
    for statement, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(statement, ast.Import | ast.ImportFrom):
            _read_import(statement, name, parts)
        elif not _is_text(statement):
            last = following if following and _is_text(following) else statement
            text = _text(lines, statement, last, end)
            used = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
            for bound in _bound(statement, name):
                parts.definitions[bound] = Definition(text, used)
        end = statement.end_lineno or end
    return parts


def _is_text(statement: ast.stmt) -> bool:
    """Whether it is a docstring."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _text(lines: list[str], first: ast.stmt, last: ast.stmt, after: int) -> str:
    """The source from a statement to another, with the comments right before it.

    Args:
        lines: of the module.
        first: where it begins, decorators included.
        last: where it ends.
        after: the line that the statement before it ends on, counted from 1.
    """
    decorators = getattr(first, "decorator_list", [])
    begin = min([first.lineno, *(d.lineno for d in decorators)]) - 1
    while begin > after and lines[begin - 1].startswith("#"):
        begin -= 1
    return "\n".join(lines[begin : last.end_lineno])


def _bound(statement: ast.stmt, module: str) -> list[str]:
    """The names that a definition gives a meaning."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        nodes = [node for target in targets for node in ast.walk(target)]
        return [node.id for node in nodes if isinstance(node, ast.Name)]
    kind = type(statement).__name__
    raise ValueError(f"{module}, line {statement.lineno}: {kind} cannot be bundled")


def _read_import(statement: ast.Import | ast.ImportFrom, name: str, parts: Module) -> None:
    package = name.split(".")[0]
    origin = getattr(statement, "module", None) or ""
    for alias in statement.names:
        bound = alias.asname or alias.name
        is_own = package in (origin.split(".")[0], alias.name.split(".")[0])
        if is_own and isinstance(statement, ast.ImportFrom) and alias.asname is None:
            parts.inside[bound] = (origin, bound)
        elif is_own:
            raise ValueError(f"{name} imports {alias.name} in a way that cannot be bundled")
        elif origin != "__future__":
            renamed = f" as {alias.asname}" if alias.asname else ""
            start = f"from {origin} import" if origin else "import"
            # `import a.b` binds `a`.
            key = bound if alias.asname or origin else bound.split(".")[0]
            parts.outside[key] = f"{start} {alias.name}{renamed}"


def _needed(roots: list[Name]) -> tuple[set[Name], set[str], list[str]]:
    """What definitions need, directly or not.

    Returns:
        The definitions, the imports from elsewhere, and the modules in an order of definition.
    """
    needed: set[Name] = set()
    imports: set[str] = set()
    meaning: dict[str, Name | str] = {}
    below: dict[str, set[str]] = {}
    waiting = list(roots)
    while waiting:
        module, name = waiting.pop()
        parts, above = _read(module), below.setdefault(module, set())
        if name in parts.inside:
            above.add(parts.inside[name][0])
            waiting.append(parts.inside[name])
            continue
        if name not in parts.definitions and name not in parts.outside:
            continue  # a local name, or one of Python's own
        what = (module, name) if name in parts.definitions else parts.outside[name]
        if meaning.setdefault(name, what) != what:
            raise ValueError(f"{name} means both {meaning[name]} and {what}: rename one of them")
        if name in parts.outside:
            imports.add(parts.outside[name])
        elif (module, name) not in needed:
            needed.add((module, name))
            waiting += [(module, used) for used in sorted(parts.definitions[name].uses)]
    return needed, imports, list(TopologicalSorter(below).static_order())


def _import_block(statements: set[str]) -> str:
    """Imports in the usual order: Python's own, then others; names of one module on one line."""
    groups: list[list[str]] = [[], []]
    whole = sorted(s for s in statements if s.startswith("import "))
    names: dict[str, list[str]] = {}
    for statement in sorted(statements - set(whole)):
        module, name = statement.removeprefix("from ").split(" import ")
        names.setdefault(module, []).append(name)
    for line in [*whole, *(f"from {m} import {', '.join(n)}" for m, n in names.items())]:
        root = line.split()[1].split(".")[0]
        groups[root not in sys.stdlib_module_names].append(line)
    blocks = ["from __future__ import annotations", *("\n".join(g) for g in groups if g)]
    return "\n\n".join(blocks)
