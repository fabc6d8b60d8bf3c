"""docs/explanation/deepspeed-patches.md, the table in the code, the tree, and the issue texts agree."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from ds_trainer.engine.library_functions import library_rows

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "ds_trainer"
PAGE = (ROOT / "docs" / "explanation" / "deepspeed-patches.md").read_text(encoding="utf-8")
FOREIGN = ("deepspeed", "torch", "transformers", "accelerate", "peft", "datasets", "bitsandbytes")
# Private by name, but what their packages tell others to use, or without an inside.
OPEN = re.compile(
    r"torch\.utils\._(pytree|python_dispatch)|torch\._subclasses|torch\._foreach_\w+|torch\.testing\._internal"
    r"|torch\._C\.(DisableTorchFunctionSubclass|_disabled_torch_function_impl|_swap_tensor_impl|_distributed_c10d)"
    r"|torch\.nn\.modules\.\w+\._\w+Norm|torch\.nn\.modules\.dropout\._DropoutNd"
    r"|torch\.Tensor\._make_wrapper_subclass|torch\._C$|torch\._(assert_async|fused_sdp_choice)|torch\.ops\.aten\._\w+|huggingface_hub"
)


def rows_of_page() -> list[list[str]]:
    """The cells of the tables of patches: file, what, why, what we do, test, upstream."""
    patches = PAGE.partition("## Why there are converters")[0]
    lines = [line for line in patches.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def bound_names(tree: ast.AST) -> dict[str, str]:
    """Names that stand for something of another package anywhere in a file, with its dotted name."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in FOREIGN:
                    found[alias.asname or alias.name.split(".")[0]] = (
                        alias.name if alias.asname else alias.name.split(".")[0]
                    )
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FOREIGN:
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):  # optimizer = stage3.Optimizer
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Attribute)
        ):
            dotted = dotted_name(node.value, found)
            if dotted is not None:
                found.setdefault(node.targets[0].id, dotted)
    return found


def dotted_name(node: ast.AST, names: dict[str, str]) -> str | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in names:
        return None
    return ".".join([names[node.id], *reversed(parts)])


def dependencies(path: Path) -> Iterator[str]:
    """What a file replaces in other packages, and the private names of theirs that it uses."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = bound_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AugAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                dotted = dotted_name(target, names) if isinstance(target, ast.Attribute) else None
                if dotted is not None and not dotted.startswith("torch.backends"):
                    yield dotted
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "_replace"):
            owners = [dotted for argument in node.args[:2] if (dotted := dotted_name(argument, names)) is not None]
            yield from owners
        elif isinstance(node, ast.Attribute):
            dotted = dotted_name(node, names)
            if dotted is not None and re.search(r"\._[a-zA-Z]", dotted):
                yield dotted
    for dotted in names.values():
        if re.search(r"\._[a-zA-Z]", dotted):
            yield dotted


def test_the_page_and_the_table_name_the_same_files() -> None:
    of_page = {cell.strip("`") for row in rows_of_page() for cell in row[0].split(", ")}
    assert of_page == {row.file for row in library_rows()}


def test_every_file_that_replaces_or_uses_what_is_private_is_in_the_table() -> None:
    known = {row.file for row in library_rows()}
    found = {
        str(path.relative_to(PACKAGE)): sorted(names)
        for path in PACKAGE.rglob("*.py")
        if (names := {name for name in dependencies(path) if not OPEN.match(name)})
    }
    assert len(found) > 15
    assert {file: names for file, names in found.items() if file not in known} == {}


def test_paths_on_the_page_exist() -> None:
    missing = []
    for name in set(re.findall(r"`([\w./]+(?:\.py|/))`", PAGE)):
        roots = (ROOT, PACKAGE, PACKAGE / "checkpoint" / "converters")
        if not any((root / name).exists() for root in roots):
            missing.append(name)
    assert missing == []


def test_every_patch_that_a_project_could_spare_us_has_an_issue_text() -> None:
    """A bug has a reproducer, a wish shows the call, and no text is left behind when its patch is deleted."""
    # The sections of docs/upstream, by `page.md#anchor`.
    found = {}
    for page in (ROOT / "docs" / "upstream").glob("*.md"):
        for section in page.read_text(encoding="utf-8").split("\n## ")[1:]:
            title, _, body = section.partition("\n")
            anchor = re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())
            found[f"{page.name}#{anchor}"] = body
    texts, linked = found, set()
    assert len(texts) > 35
    for row in rows_of_page():
        links = re.findall(r"\[(bug|API)\]\(\.\./upstream/([^)]+)\)", row[-1])
        shown = ", ".join(f"[{kind}](../upstream/{target})" for kind, target in links)
        assert row[-1] == (shown or "no"), row[0]
        for kind, target in links:
            assert target in texts, f"{row[0]}: {target} does not exist"
            assert "```python" in texts[target] or (kind == "API" and "```text" in texts[target]), target
            linked.add(target)
    assert set(texts) == linked
