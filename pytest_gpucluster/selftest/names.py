"""The names of torch and NVML that the product's own code uses: whether they exist here and take these arguments.

They are read from the source, so that no list has to be kept. What the product looks up by a text, and does without
where it is missing, is optional.
"""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
_FOLDERS = ("agreement", "benchmarks", "device", "node", "session")
_ROOTS = {
    "torch": "torch",
    "dist": "torch.distributed",
    "distributed_c10d": "torch.distributed.distributed_c10d",
    "nvml": "pynvml",
    "pynvml": "pynvml",
}
_NVML = re.compile(r"(?:c_)?(?:nvml[A-Z]|NVML)\w*[a-zA-Z0-9]")
_BY_OBJECT = ("torch.distributed.ProcessGroup.abort", "torch.distributed.distributed_c10d._world.pg_names")
"""What the product reaches through objects, where the source does not show whose they are."""
_DUMPS = "torch._C._distributed_c10d._dump_fr_trace_json", "torch._C._distributed_c10d._dump_nccl_trace_json"


@dataclass(frozen=True, kw_only=True)
class Use:
    """One name in the source: ``call`` has the number of plain arguments and the names of the others."""

    name: str
    where: str
    call: tuple[int, tuple[str, ...]] | None = None
    optional: bool = False


def uses(package: Path = PACKAGE) -> Iterator[Use]:
    """Yield each use of a name."""
    for folder in _FOLDERS:
        for path in sorted((package / folder).rglob("*.py")):
            yield from _uses_in(ast.parse(path.read_text(encoding="utf-8")), str(path.relative_to(package)))
    yield from (Use(name=name, where="device/process_group.py") for name in _BY_OBJECT)
    yield from (Use(name=name, where="device/process_group.py", optional=True) for name in _DUMPS)


def _uses_in(tree: ast.AST, path: str) -> Iterator[Use]:
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _NVML.fullmatch(node.value):
            yield Use(name=f"pynvml.{node.value}", where=f"{path}:{node.lineno}", optional=True)
        if not isinstance(node, ast.Attribute) or id(node) in inner:
            continue
        name = _dotted(node)
        if name is None or (name.startswith("pynvml.") and not _NVML.fullmatch(name.partition(".")[2])):
            continue
        called = calls.get(id(node))
        shape = None
        if called is not None and not any(isinstance(each, ast.Starred) for each in called.args):
            named = [each.arg for each in called.keywords]
            shape = (len(called.args), tuple(name for name in named if name)) if None not in named else None
        yield Use(name=name, where=f"{path}:{node.lineno}", call=shape)


def _dotted(node: ast.expr) -> str | None:
    """Return the whole name of ``torch.float32`` or ``self._nvml.nvmlInit``; None for others."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        if node.attr.lstrip("_") in _ROOTS and isinstance(node.value, ast.Name) and node.value.id == "self":
            node = ast.Name(id=node.attr.lstrip("_"))
            break
        parts.append(node.attr)
        node = node.value
    root = _ROOTS.get(node.id) if isinstance(node, ast.Name) else None
    return ".".join([root, *reversed(parts)]) if root and parts else None


def problem(use: Use) -> str:
    """Return what is wrong with a use here: the name is missing, or does not take the arguments; "" if nothing is."""
    try:
        found = pkgutil.resolve_name(use.name)
    except (AttributeError, ImportError):
        return f"{use.name} is missing ({use.where})"
    if use.call is not None:
        count, names = use.call
        try:
            inspect.signature(found).bind(*[None] * count, **dict.fromkeys(names))
        except ValueError:  # it shows no signature
            return ""
        except TypeError as error:
            return f"{use.name}: {error} ({use.where})"
    return ""
