#!/usr/bin/env python3
"""Figures about the structure of the code: what a micro-batch passes through, how large the Trainer is, who calls whom.

    python tools/structure.py             all figures of this checkout
    python tools/structure.py --walk      and the functions of one optimizer step, in the order of their first call
    python tools/structure.py --budget    the figures of tools/budget.yaml beside their ceilings; ends with 1 above one

Needs the extra ``hf``: the walk trains a tiny language model of transformers on the CPU.

How it counts:

* *Functions of a micro-batch*: named functions and methods of ``ds_trainer`` (no lambdas, comprehensions or generator
  expressions) that are called once for each micro-batch of an optimizer step of several, from its fetch to the end of
  its backward pass. Rank 0 of one process, default arguments.
* *Methods and attributes of the Trainer*: functions defined in its classes; names assigned to ``self`` in them, or
  declared in their bodies.
* *Private calls across files*: ``x._name(...)`` where ``_name`` is a function or method defined in another file of the
  package and in none that the caller defines or inherits from in its own file.
* *Functions of a toy run*: the same kind of functions, of all threads, from the first import to the saved model: three
  steps of a language model of two layers with a checkpoint (:func:`toy_run`). Public names are those of its Trainer,
  before and after, without what transformers' Trainer has.
* *Modules*: what ``from ds_trainer import Trainer, TrainingArguments`` loads of ``ds_trainer``. Its seconds are CPU
  time, without torch; they have no ceiling, as they depend on the machine.
* *Positional calls*: calls with more than six positional arguments of what the package defines. Operators of torch and
  kernels have no names for theirs.
* *Parts and imports*: folders and files directly in ``training/``, and the pairs of which one imports the other at run
  time.
"""

from __future__ import annotations

import argparse
import ast
import collections
import dataclasses
import inspect
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import walks
import yaml

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "ds_trainer"
BUDGET = ROOT / "tools" / "budget.yaml"

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
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    functions = sum(isinstance(node, kinds) for _, tree in sources() for node in ast.walk(tree))
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


# -- the budget --------------------------------------------------------------------------------------------------------


def lines_of_tests() -> int:
    """Lines of all Python files below ``tests/``."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / "tests").rglob("*.py"))


def positional_calls() -> list[str]:
    """``file:line name`` of every call of the package's own with more than six positional arguments."""
    parsed = list(sources())
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    own = {node.name for _, tree in parsed for node in ast.walk(tree) if isinstance(node, kinds)} | {"cls"}
    return [
        f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node.func)}"
        for path, tree in parsed
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and len(node.args) > 6
        and ast.unparse(node.func).rpartition(".")[2] in own
        and ast.unparse(node.func) != "logger.warning"
    ]


def own_arguments() -> list[str]:
    """Fields of TrainingArguments that transformers' does not have."""
    import transformers

    from ds_trainer import TrainingArguments

    theirs = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    return [field.name for field in dataclasses.fields(TrainingArguments) if field.name not in theirs]


def _in_new_process(function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a function of this file returns in a process of its own, which has imported nothing."""
    script = f"import json, structure; print(chr(10) + json.dumps(structure.{function.__name__}()))"
    command = [sys.executable, "-c", script]
    environment = {**os.environ, "DS_TRAINER_SELF_TEST": "never"}  # else the first run on a machine calls more
    done = subprocess.run(command, cwd=ROOT / "tools", env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{function.__name__} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def start() -> dict[str, Any]:
    """Modules of the package that an import of the Trainer loads, and its CPU seconds without torch."""
    import torch  # noqa: F401

    began = time.process_time()
    from ds_trainer import Trainer, TrainingArguments  # noqa: F401

    seconds = time.process_time() - began
    return {"modules": sum(name.partition(".")[0] == "ds_trainer" for name in sys.modules), "seconds": seconds}


def toy_run() -> dict[str, Any]:
    """Functions and files that three steps of a toy pass through; public names of its Trainer beyond transformers'."""
    called: set[tuple[str, int]] = set()

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        name = walks.name_of(frame) if event == "call" else None
        if name is not None:
            called.add((name, frame.f_code.co_firstlineno))

    threading.setprofile(profile)
    sys.setprofile(profile)
    from transformers import LlamaConfig, LlamaForCausalLM

    from ds_trainer import Trainer, TrainingArguments

    rows = [{"input_ids": list(range(64)), "labels": list(range(64))}] * 64
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    with tempfile.TemporaryDirectory() as directory:
        args = TrainingArguments(
            *(directory,),
            **{"max_steps": 3, "per_device_train_batch_size": 8, "learning_rate": 1e-2, "logging_steps": 1},
            **{"report_to": "none", "save_strategy": "steps", "save_steps": 2, "use_cpu": True},
        )
        trainer = Trainer(LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)), args, train_dataset=rows)
        names = set(dir(trainer))
        trainer.train()
        trainer.save_model()
        names |= set(dir(trainer))
    sys.setprofile(None)
    threading.setprofile(None)  # type: ignore[arg-type]
    import transformers

    tree = ast.parse(inspect.getsource(inspect.getmodule(transformers.Trainer)))  # type: ignore[arg-type]
    theirs = set(dir(transformers.Trainer)) | set(_written(tree, {"self"}))
    return {
        "functions": len(called),
        "files": len({name.partition(":")[0] for name, _ in called}),
        "names": sorted(name for name in names - theirs if not name.startswith("_")),
    }


def figures() -> Iterator[tuple[str, float, float | None, str]]:
    """Every figure of the budget: its name, its value, its ceiling (None: it has none) and what the ceiling is for."""
    of_package, at_start, of_toy = size(), _in_new_process(start), _in_new_process(toy_run)
    of_each = [name for name, count in walks.step() if count >= walks.MICRO_BATCHES]
    values: dict[str, float] = {
        "files": of_package["files"],
        "product lines": of_package["lines"],
        "functions": of_package["functions"],
        "functions of a toy run": of_toy["functions"],
        "files of a toy run": of_toy["files"],
        "modules of an import": at_start["modules"],
        "functions of a micro-batch": len(of_each),
        "files of a micro-batch": len({name.partition(":")[0] for name in of_each}),
        "public names beyond transformers": len(of_toy["names"]),
        "own arguments": len(own_arguments()),
        "positional calls": len(positional_calls()),
        "test lines / product lines": round(lines_of_tests() / of_package["lines"], 3),
    }
    ceilings = yaml.safe_load(BUDGET.read_text(encoding="utf-8"))
    if ceilings.keys() != values.keys():
        raise RuntimeError(f"{BUDGET} and the figures differ: {', '.join(sorted(ceilings.keys() ^ values.keys()))}")
    for name, value in values.items():
        yield name, value, ceilings[name]["ceiling"], f"aim {ceilings[name]['aim']}" if "aim" in ceilings[name] else ""
    yield "seconds of an import", round(at_start["seconds"], 2), None, "CPU, beside torch; aim 0.25"


def budget() -> int:
    """Print the figures beside their ceilings; the exit code says whether one is above."""
    above = []
    for name, value, ceiling, note in figures():
        over = ceiling is not None and value > ceiling
        above += [name] * over
        print(f"{name:<34} {value:>9,} {'' if ceiling is None else f'{ceiling:,}':>9}  {note}{'  ABOVE' * over}")
    if above:
        print(f"above the ceiling: {', '.join(above)}. Make it smaller, or raise it in a commit that says what for.")
    return int(bool(above))


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--walk", action="store_true", help="list the functions of one optimizer step")
    parser.add_argument("--private", action="store_true", help="list the private calls across files")
    parser.add_argument("--positional", action="store_true", help="list the positional calls of the budget")
    parser.add_argument("--budget", action="store_true", help="print the budget; ends with 1 above a ceiling")
    options = parser.parse_args()
    if options.budget:
        sys.exit(budget())
    if options.positional:
        print("\n".join(positional_calls()))
        return
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
