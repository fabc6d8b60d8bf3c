#!/usr/bin/env python3
"""Figures about the structure of the code: what a micro-batch passes through, how large the Trainer is, who calls whom.

    python tools/structure.py             all figures of this checkout
    python tools/structure.py --walk      and the functions of one optimizer step, in the order of their first call

Needs the extra ``hf``: the walk trains a tiny language model of transformers on the CPU.

How it counts:

* *Functions of a micro-batch*: named functions and methods of ``ds_trainer`` (no lambdas, comprehensions or generator
  expressions) that are called once for each micro-batch of an optimizer step of several, from its fetch to the end of
  its backward pass. Rank 0 of one process, default arguments.
* *Methods and attributes of the Trainer*: functions defined in its classes; names assigned to ``self`` in them, or
  declared in their bodies.
* *Private calls across files*: ``x._name(...)`` where ``_name`` is a function or method defined in another file of the
  package and in none that the caller defines or inherits from in its own file.
* *Parts and imports*: folders and files directly in ``training/``, and the pairs of which one imports the other at run
  time.
"""

from __future__ import annotations

import argparse
import ast
import collections
from collections.abc import Iterator
from pathlib import Path

import walks

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "ds_trainer"

# Names with an underscore that are public: of named tuples, of the reference API, of TensorFlow, and those of
# transformers' Trainer that subclasses of other libraries override.
PUBLIC = {
    *("_replace", "_prepare_inputs", "_new_training", "_new_epoch", "_new_step", "_inputs"),
    *("_get_train_sampler", "_get_eval_sampler", "_remove_unused_columns", "_get_collator_with_removed_columns"),
    *(
        "_prepare_input",
        "_get_num_items_in_batch",
        "_save_checkpoint",
        "_load_optimizer_and_scheduler",
        "_get_output_dir",
    ),
}


def sources() -> Iterator[tuple[Path, ast.Module]]:
    """Every file of the package, parsed."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def size() -> dict[str, int]:
    """Files, lines and functions of the package."""
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.rglob("*.py")}
    functions = sum(isinstance(node, ast.FunctionDef) for _, tree in sources() for node in ast.walk(tree))
    return {"files": len(lines), "lines": sum(lines.values()), "functions": functions, "longest": max(lines.values())}


# -- the Trainer -------------------------------------------------------------------------------------------------------


def trainer_classes() -> dict[str, ast.ClassDef]:
    """The Trainer and its base classes inside the package, by name."""
    known = {node.name: node for _, tree in sources() for node in tree.body if isinstance(node, ast.ClassDef)}
    found: dict[str, ast.ClassDef] = {}
    todo = ["Trainer"]
    while todo:
        name = todo.pop(0)
        if name in known and name not in found:
            found[name] = known[name]
            todo += [base.id for base in known[name].bases if isinstance(base, ast.Name)]
    return found


def trainer() -> dict[str, int]:
    """Classes, methods and attributes of the Trainer, and attributes that several files write."""
    classes = trainer_classes()
    methods = [node for one in classes.values() for node in one.body if isinstance(node, ast.FunctionDef)]
    attributes: set[str] = set()
    for one in classes.values():
        attributes |= {
            node.target.id for node in one.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
        attributes |= {
            target.id
            for node in one.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        attributes |= set(_written(one, {"self"}))
    accessors = {method.name for method in methods if method.decorator_list}
    writers: dict[str, set[Path]] = collections.defaultdict(set)
    for path, tree in sources():
        names = {"trainer", "self"} if any(one.name in classes for one in _classes(tree)) else {"trainer"}
        for name in _written(tree, names):
            if name in attributes - accessors:
                writers[name].add(path)
    return {
        "classes": len(classes),
        "methods": len({method.name for method in methods}),
        "attributes": len(attributes - accessors),
        "attributes with several writers": sum(len(files) > 1 for files in writers.values()),
    }


def _classes(tree: ast.Module) -> list[ast.ClassDef]:
    return [node for node in tree.body if isinstance(node, ast.ClassDef)]


def _written(tree: ast.AST, owners: set[str]) -> Iterator[str]:
    """Attributes assigned to names in ``owners``."""
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = list(node.targets)
        elif isinstance(node, ast.AnnAssign | ast.AugAssign):
            targets = [node.target]
        for target in targets:
            for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id in owners:
                    yield part.attr


# -- calls and imports -------------------------------------------------------------------------------------------------


def private_calls() -> list[str]:
    """``file:line name`` of every call of an underscore name that is defined in another file only."""
    defined: dict[str, set[Path]] = collections.defaultdict(set)
    parsed = list(sources())
    for path, tree in parsed:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                defined[node.name].add(path)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                defined[node.attr].add(path)
    found = []
    for path, tree in parsed:
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            name = node.func.attr
            private = name.startswith("_") and not name.startswith("__") and name not in PUBLIC
            if private and defined[name] and path not in defined[name]:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno} {name}")
    return found


def parts() -> dict[str, int]:
    """Folders and loose files in ``training/``, and who imports whom at run time."""
    imports: set[tuple[str, str]] = set()
    names: set[str] = set()
    for path, tree in sources():
        if PACKAGE / "training" not in path.parents or path.name == "__init__.py":
            continue
        part = path.relative_to(PACKAGE / "training").parts[0].removesuffix(".py")
        names.add(part)
        for node in _run_time(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ds_trainer.training."):
                other = (node.module or "").split(".")[2]
                if other != part:
                    imports.add((part, other))
    holders = sum("import Trainer\n" in path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    return {"parts": len(names), "imports": len(imports), "files that import the Trainer": holders}


def _run_time(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under ``if TYPE_CHECKING``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        yield node
        yield from _run_time(node)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--walk", action="store_true", help="list the functions of one optimizer step")
    parser.add_argument("--private", action="store_true", help="list the private calls across files")
    options = parser.parse_args()
    steps = walks.step()
    of_each = [name for name, count in steps if count >= walks.MICRO_BATCHES]
    print(f"functions of a micro-batch       {len(of_each)}")
    print(f"files of a micro-batch           {len({name.partition(':')[0] for name in of_each})}")
    print(f"functions of a step              {len(steps)} in {len({n.partition(':')[0] for n, _ in steps})} files")
    calls = private_calls()
    for title, figures in (("package", size()), ("Trainer", trainer()), ("training/", parts())):
        print(f"{title:<32} {', '.join(f'{name} {count}' for name, count in figures.items())}")
    print(f"private calls across files       {len(calls)}")
    if options.private:
        print("\n".join(f"  {call}" for call in calls))
    if options.walk:
        print("\n".join(f"{count:5} {name}" for name, count in steps))


if __name__ == "__main__":
    main()
