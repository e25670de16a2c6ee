"""The loader of workload files: one profile, with an operator's overrides.

Files are read strictly. ``load`` returns the profile in force with the overrides applied to it:

workload = load(Path("acceptance/workloads.yaml"), profile="full").workload
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_gpucluster.config.workload import CPU_PROFILE, KEYS, PROFILES, SECTIONS, Workload, WorkloadRecord, build
from pytest_gpucluster.config.yaml_source import Document, Node
from pytest_gpucluster.errors import OptionError, ThresholdsError
from pytest_gpucluster.metrics import units

FILE_NAME = "workloads.yaml"
SCHEMA_VERSION = 1
FILE_KEYS = ("schema_version", "profiles")
INHERITS = "inherits"


def _allowed_near(key: str) -> str:
    """Return the keys of the section that an unknown one is in, or the sections: all keys are too many to list."""
    parts = key.split(".")
    for count in range(len(parts), 0, -1):
        section = ".".join(parts[:count])
        siblings = [known for known in KEYS if known.startswith(f"{section}.")]
        if siblings:
            return f"allowed in {section} are {', '.join(siblings)}"
    sections = dict.fromkeys(known.partition(".")[0] for known in KEYS)
    return f"allowed are keys of {', '.join(sections)}, such as matmul.sizes"


@dataclass(frozen=True, kw_only=True)
class Override:
    """One ``KEY=VALUE`` of an operator. ``origin`` is how the operator wrote it, and where."""

    key: str
    texts: tuple[str, ...]
    origin: str = ""

    @classmethod
    def parse(cls, text: str, *, origin: str = "") -> Override:
        """Read ``matmul.sizes=8192,16384``; ``origin`` is how reports call it.

        Raises:
            OptionError: an unknown key, or a value that the key does not allow.
        """
        key, equals, value = (part.strip() for part in text.partition("="))
        if not equals:
            raise OptionError(f"{text!r} is no KEY=VALUE, such as matmul.sizes=8192,16384 or matmul.window=5s")
        if key not in KEYS:
            hint = units.did_you_mean(key, KEYS)
            raise OptionError(f"unknown key {key!r}; {_allowed_near(key)}{hint}")
        spec = KEYS[key]
        texts = tuple(part.strip() for part in value.split(",")) if spec.is_list else (value,)
        complaints = [complaint for _, complaint in spec.read(texts)[1]]
        if complaints:
            raise OptionError("; ".join(f"{key}: {complaint}" for complaint in complaints))
        return cls(key=key, texts=texts, origin=origin or f"override {text}")

    def __str__(self) -> str:
        return f"{self.key}={', '.join(self.texts)}"


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A workload, and its record for the journal."""

    workload: Workload
    record: WorkloadRecord


def find(start: Path, root: Path, name: str = FILE_NAME) -> Path | None:
    """Return the file of this name of a folder: there, or in the nearest folder above it, up to ``root``."""
    inside = [folder for folder in start.parents if folder.is_relative_to(root)]
    return next((folder / name for folder in (start, *inside) if (folder / name).is_file()), None)


def load(
    path: Path,
    *,
    profile: str,
    overrides: Sequence[Override] = (),
    name: str | None = None,
    small_training: bool = False,
) -> Loaded:
    """Read a file of workloads and return the profile in force.

    Args:
        path: the file.
        profile: one of PROFILES.
        overrides: laid over the profile.
        name: how reports call the file; by default its path.
        small_training: what trains for the correctness of its results has the sizes of the profile cpu.

    Raises:
        ThresholdsError: lists every error of the file, each as ``file:line:column: ...``; or the profile in force is
            not in it, or does not go with the overrides.
    """
    reader = _Reader(name or str(path))
    profiles = reader.read(path)
    if reader.file.complaints:
        raise ThresholdsError("\n".join(reader.file.report()))
    if profile not in profiles:
        found = f"{reader.file.name}: the profile {profile!r} is asked for, and the file has {', '.join(profiles)}"
        if profile == CPU_PROFILE:
            raise ThresholdsError(f"{found}; add it to the file: a rehearsal on cpu takes no other")
        raise ThresholdsError(f"{found}; add it to the file, or choose another with --gpucluster-profile")
    if small_training:
        of_cpu = {key: entry for key, entry in profiles.get(CPU_PROFILE, {}).items() if _is_small(key)}
        profiles[profile] = {**profiles[profile], **of_cpu}
    entries = dict(profiles[profile])
    for override in overrides:
        value, _ = KEYS[override.key].read(override.texts)
        entries[override.key] = _Entry(override.texts, value, override.origin)
    if overrides:
        wrong = [
            f"{key.origin}: {text} ({other.origin})"
            for key, other, text in _contradictions(entries, own={override.key for override in overrides})
        ]
        if wrong:
            raise ThresholdsError("\n".join(wrong))
    record = WorkloadRecord(
        profile=profile,
        file=reader.file.name,
        values={path: ", ".join(entries[path].texts) for path in KEYS},
        origins={path: entries[path].origin for path in KEYS},
        weakened=tuple(
            f"{key}={', '.join(entries[key].texts)} (in the file: {', '.join(profiles[profile][key].texts)})"
            for key in dict.fromkeys(override.key for override in overrides)
            if not _asks_as_much(key, entries[key].value, profiles[profile][key].value)
        ),
    )
    return Loaded(workload=build(profile, {path: entry.value for path, entry in entries.items()}), record=record)


_TRAININGS = ("training.", "fsdp.", "checkpoint.", "lora.", "failure_propagation.")
_WITH_A_RATE = ("training.throughput.", "scaling.", "vision.")
_OF_THE_HOST = (".compiled", ".workers", ".prefetch", ".warmup", ".window", ".image_size")


def _is_small(key: str) -> bool:
    """Return whether a simulated cluster takes a key of the profile cpu: all of a training, and of one with a rate the
    times. Each step is really taken, and a simulated one of milliseconds takes as long on the host."""
    return key.endswith(_OF_THE_HOST) if key.startswith(_WITH_A_RATE) else key.startswith(_TRAININGS)


_LONGER_ASKS_MORE = frozenset(
    (
        *("warmup", "window", "longest", "duration", "steps", "warmup_steps", "parity_steps", "repeats", "rounds"),
        *("passes", "copies", "deaths", "rows", "renames", "small_files", "held_out", "held_out_blocks"),
    )
)
"""Last words of the keys of which a larger value asks for more of the same."""


def _asks_as_much(key: str, value: Any, of_file: Any) -> bool:
    """Return whether a value asks for at least as much as the file's: a longer list, longer times, a finer tolerance.

    Whether a larger model or another dtype asks for more cannot be decided by the key: that is another workload.
    """
    if value == of_file:
        return True
    if isinstance(of_file, tuple):
        return isinstance(value, tuple) and set(of_file) <= set(value)
    name = key.rpartition(".")[2]
    if name in _LONGER_ASKS_MORE:
        return bool(value >= of_file)
    return name == "tolerance" and bool(value <= of_file)


@dataclass(frozen=True)
class _Entry:
    texts: tuple[str, ...]
    value: Any
    origin: str
    node: Node | None = None


def _contradictions(entries: Mapping[str, _Entry], own: Iterable[str]) -> Iterator[tuple[_Entry, _Entry, str]]:
    """Yield each window that is longer than its longest time: the entry that is one's own, the other, and the text.

    Where both were inherited, it is reported for the profile that they come from.
    """
    for section in SECTIONS:
        window, longest = f"{section.path}.window", f"{section.path}.longest"  # of a section that is sampled
        if not {window, longest} <= entries.keys() or not {window, longest} & set(own):
            continue
        if entries[window].value > entries[longest].value:
            is_window, is_longest = (entries[path].texts[0] for path in (window, longest))
            text = f"{window} is {is_window}, and {longest}, which must not be shorter, is {is_longest}"
            first, second = (longest, window) if longest in own else (window, longest)
            yield entries[first], entries[second], text


def key_tree() -> dict[str, Any]:
    """Return the keys of a profile as they are nested."""
    tree: dict[str, Any] = {}
    for path in KEYS:
        *folders, name = path.split(".")
        level = tree
        for folder in folders:
            level = level.setdefault(folder, {})
        level[name] = path
    return tree


class _Reader:
    """Reads one file, collecting errors instead of stopping at the first."""

    def __init__(self, name: str) -> None:
        self.file = Document(name)
        self._nodes: dict[str, tuple[Node, Node]] = {}
        self._own: dict[str, dict[str, _Entry]] = {}
        self._parents: dict[str, str] = {}
        self._misspelt: set[str] = set()

    def read(self, path: Path) -> dict[str, dict[str, _Entry]]:
        """Return the complete profiles by name."""
        root = self.file.root(path, needs="schema_version and profiles", block_scalar_hint="quote the value")
        top = None if root is None else self.file.mapping(root, "the file", FILE_KEYS)
        if root is not None and top is not None:
            self._top(root, top)
        return {name: self._complete(name) for name in self._own}

    def _top(self, root: Node, top: Mapping[str, tuple[Node, Node]]) -> None:
        whole = not self.file.complaints  # else what is missing may be what was misspelt
        self.file.require_version(root, top, SCHEMA_VERSION)
        if "profiles" not in top:
            if whole:
                self.file.fail(root, f"profiles is missing; it maps {', '.join(PROFILES)} to sizes and times")
            return
        self._nodes = self.file.mapping(top["profiles"][1], "profiles", PROFILES) or {}
        for name, (_, node) in self._nodes.items():
            self._profile(name, node)
        for name in self._own:
            self._check(name)

    def _profile(self, name: str, node: Node) -> None:
        before = len(self.file.complaints)
        body = self.file.mapping(node, f"the profile {name!r}", (INHERITS, *key_tree()))
        entries: dict[str, _Entry] = {}
        self._own[name] = entries
        structure = len(self.file.complaints) - before
        if body is not None:
            inherits = body.pop(INHERITS, None)
            if inherits is not None:
                self._inherits(name, inherits[1])
            for key, (_, value) in body.items():
                structure += self._level(key, value, key_tree()[key], entries)
        if structure:
            self._misspelt.add(name)  # what is missing may be what was misspelt

    def _inherits(self, name: str, node: Node) -> None:
        parent = self.file.text(node, INHERITS)
        before = [other for other in self._own if other != name]
        if parent in before:
            self._parents[name] = str(parent)
            return
        self._misspelt.add(name)
        if parent is not None:
            listed = ", ".join(before) or "there is none"
            hint = units.did_you_mean(parent, before)
            self.file.fail(
                node, f"{name!r} inherits {parent!r}; it must be a profile that stands before it: {listed}{hint}"
            )

    def _level(self, path: str, node: Node, allowed: Any, entries: dict[str, _Entry]) -> int:
        """Read a section or a key; returns how many complaints it got about its keys."""
        if isinstance(allowed, str):
            self._key(path, node, entries)
            return 0
        before = len(self.file.complaints)
        body = self.file.mapping(node, path, tuple(allowed)) or {}
        count = len(self.file.complaints) - before
        return count + sum(
            self._level(f"{path}.{key}", value, allowed[key], entries) for key, (_, value) in body.items()
        )

    def _key(self, path: str, node: Node, entries: dict[str, _Entry]) -> None:
        spec = KEYS[path]
        nodes = self.file.items(node) if spec.is_list else [node]
        found = [self.file.text(item, path) for item in nodes]
        texts = tuple(" ".join(text.split()) for text in found if text is not None)
        value = None
        if texts and len(texts) == len(nodes):
            value, complaints = spec.read(texts)
            for index, text in complaints:
                self.file.fail(nodes[index], f"{path}: {text}")
        mark = node.start_mark
        entries[path] = _Entry(texts, value, f"{self.file.name}:{mark.line + 1}:{mark.column + 1}", node)

    def _complete(self, name: str) -> dict[str, _Entry]:
        """Return the entries of a profile: its own, before inherited ones."""
        entries: dict[str, _Entry] = {}
        for each in reversed(self._lineage(name)):
            entries |= self._own[each]
        return entries

    def _lineage(self, name: str) -> list[str]:
        parent = self._parents.get(name)
        return [name, *(self._lineage(parent) if parent is not None else [])]

    def _check(self, name: str) -> None:
        """Complain about what the profile lacks, and about values that contradict each other."""
        entries = self._complete(name)
        missing = [path for path in KEYS if path not in entries]
        if missing and not self._misspelt & set(self._lineage(name)):
            key = self._nodes[name][0]
            self.file.fail(
                key, f"the profile {name!r} lacks {', '.join(missing)}; write them, or inherits: another profile"
            )
        good = {path: entry for path, entry in entries.items() if entry.value is not None}
        for entry, other, text in _contradictions(good, own=self._own[name]):
            assert entry.node is not None
            assert other.node is not None  # both are of the file
            self.file.fail(entry.node, f"{text} (line {other.node.start_mark.line + 1})")
