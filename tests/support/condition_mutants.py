"""Small changes of the conditions in a module of rules: each drops, flips or shifts one thing.

A change that no example of the tests notices is a side of an ``or`` that no example breaks, or a side of an ``and``
that no example repairs.
"""

from __future__ import annotations

import ast
import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

_SHIFTED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
# Functions that answer a question about a configuration; others make rules and sentences.
_ANSWERS = ("bool", "int", "str", "list[str | None]")


def mutants(module: ModuleType) -> Iterator[tuple[str, ModuleType]]:
    """Every changed module, with its changed line and what the change is."""
    with open(str(module.__file__), encoding="utf-8") as file:
        source = file.read()
    tree = ast.parse(source)
    sites = [node for function in _conditions(tree) for node in ast.walk(function)]
    for index, node in enumerate(dict.fromkeys(sites)):
        for what, change in _changes(node):
            changed = copy.deepcopy(tree)
            copies = [below for function in _conditions(changed) for below in ast.walk(function)]
            target = list(dict.fromkeys(copies))[index]
            _replace(changed, target, change(target))
            yield f"line {node.lineno}: {what} in {ast.unparse(node)}", _module(module, changed)


def _conditions(tree: ast.Module) -> list[ast.AST]:
    """Lambdas, and bodies of functions that are not about making rules."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and _returns(node) in _ANSWERS]
    lambdas = [node.body for node in ast.walk(tree) if isinstance(node, ast.Lambda)]
    return [*lambdas, *(statement for function in functions for statement in function.body)]


def _returns(function: ast.FunctionDef) -> str:
    return ast.unparse(function.returns) if function.returns is not None else ""


def _changes(node: ast.AST) -> Iterator[tuple[str, Callable[[Any], ast.AST]]]:
    if isinstance(node, ast.BoolOp):
        other = ast.Or if isinstance(node.op, ast.And) else ast.And
        yield f"{type(node.op).__name__} to {other.__name__}", lambda n: ast.BoolOp(other(), n.values)
        for index, operand in enumerate(node.values):
            if not isinstance(operand, ast.Constant):  # a default, for the types
                yield f"without {ast.unparse(operand)}", _without(index)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "without not", lambda n: n.operand
    elif isinstance(node, ast.Compare):
        other_op = _SHIFTED[type(node.ops[0])]
        yield f"{other_op.__name__}", lambda n: ast.Compare(n.left, [other_op(), *n.ops[1:]], n.comparators)
    elif isinstance(node, ast.Tuple) and all(isinstance(member, ast.Constant) for member in node.elts):
        for index in range(len(node.elts)):
            yield f"without member {index}", lambda n, index=index: ast.Tuple(_cut(n.elts, index), n.ctx)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "the opposite", lambda n: ast.Constant(not n.value)
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".offloads") and len(node.args) > 1:
        yield "without the device", lambda n: ast.Call(n.func, n.args[:-1], n.keywords)


def _without(index: int) -> Callable[[Any], ast.AST]:
    def change(node: Any) -> ast.AST:
        values = _cut(node.values, index)
        return values[0] if len(values) == 1 else ast.BoolOp(node.op, values)

    return change


def _cut(values: Sequence[Any], index: int) -> list[Any]:
    return [value for i, value in enumerate(values) if i != index]


def _replace(tree: ast.AST, old: ast.AST, new: ast.AST) -> None:
    class Replace(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            return ast.copy_location(new, old) if node is old else self.generic_visit(node)

    Replace().visit(tree)
    ast.fix_missing_locations(tree)


def _module(original: ModuleType, tree: ast.Module) -> ModuleType:
    module = ModuleType(original.__name__)
    module.__file__ = original.__file__
    before = sys.modules[original.__name__]
    sys.modules[original.__name__] = module  # dataclasses look their module up
    try:
        exec(compile(tree, str(original.__file__), "exec"), vars(module))
    finally:
        sys.modules[original.__name__] = before
    return module
