"""Options and settings: how their values are parsed, and how they are resolved, each with its origin.

The command line overrides the environment, which overrides the ini file, which overrides the default.

The plugin is *active* only when this project's configuration, an ini setting, a ``--gpucluster-*`` option or a path of
the acceptance suite asks for it. An environment variable alone never turns it on: it may be left over in a shell.
"""

from __future__ import annotations

import os
import pkgutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pytest_gpucluster.errors import OptionError
from pytest_gpucluster.launch.suite import find_suite, suite_of

if TYPE_CHECKING:
    import pytest

EXIT_NOTES = "GPUCLUSTER_EXIT_NOTES"
"""``journal.verdict.VARIABLE``, which is too heavy to import here."""


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """How long to wait, in seconds, before a silence means something.

    The defaults suit hosts that share a fast network. ``--gpucluster-timeouts grace=2,join=900`` changes some.
    """

    join: float = 300.0
    """Every rank must have reported to the store by then (imports over a slow file system are the usual delay)."""
    grace: float = 1.0
    """A rank that waits in a collective for this long after a peer's failure is released."""
    stuck: float = 10.0
    """A rank that has not come back this long after its release cannot be released: the run ends."""
    dead: float = 30.0
    """A rank on another host whose heartbeat has stood still this long is lost."""
    unresponsive: float = 60.0
    """A process that lives, but whose heartbeat has stood still this long, is treated as hung."""
    terminate: float = 20.0
    """After SIGTERM everything is over by then; torchrun sends SIGKILL after 30 s."""

    @classmethod
    def parse(cls, text: str) -> Timeouts:
        """Read ``name=seconds,...``.

        Raises:
            OptionError: an unknown name, or a value that is no positive number.
        """
        allowed = ", ".join(cls.__dataclass_fields__)
        values: dict[str, float] = {}
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            name, _, value = part.partition("=")
            if name not in cls.__dataclass_fields__:
                raise OptionError(f"unknown timeout {name!r}; allowed: {allowed}, each as name=seconds")
            if name in values:
                raise OptionError(f"timeout {name!r} is given twice")
            values[name] = positive_seconds(value)
        return cls(**values)


def positive_seconds(text: str) -> float:
    """Read a positive, finite number of seconds.

    Raises:
        OptionError: anything else.
    """
    try:
        value = float(text)
    except ValueError:
        raise OptionError(f"{text!r} is not a number of seconds") from None
    if not 0 < value < float("inf"):
        raise OptionError(f"{text!r} is not a positive number of seconds")
    return value


def one_of(*allowed: str) -> Callable[[str], str]:
    """Return a parser that takes one of these words and raises OptionError at any other."""

    def parse(text: str) -> str:
        if text not in allowed:
            raise OptionError(f"{text!r} is not allowed; choose one of: {', '.join(allowed)}")
        return text

    return parse


def journal_value(text: str, base: Path) -> Path:
    """Read the place of an earlier run's journal.

    A link such as ``latest`` is followed now: this run is about to become the latest one. Whether there is a journal,
    only the rank that reads it needs to know.

    Raises:
        OptionError: no path.
    """
    from pytest_gpucluster.errors import JournalError  # other sessions pay nothing
    from pytest_gpucluster.journal.journal import locate

    if not text.strip():
        raise OptionError("no path")
    path = base / Path(text.strip()).expanduser()
    try:
        return locate(path).resolve()
    except (JournalError, OSError):
        return path


DEVICES = ("cuda", "cpu", "simulated")
PROFILES = ("quick", "full", "soak")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One resolved value and where it came from ("command line", "environment", "ini", "default")."""

    value: Any
    origin: str


@dataclass(frozen=True, kw_only=True)
class _Option:
    """One option. A repeatable one is given as often as needed; it has one value a line in the ini file, and ``;``
    between the values in the environment. Its value is a tuple."""

    name: str
    metavar: str
    help: str
    default: str | None = None
    parse: Callable[..., Any] | str = str
    """A function, or the name of one in this package, so that a session without the option need not import it."""
    takes: Literal["", "origin", "base"] = ""
    """What ``parse`` takes with the text: where it was written, or what a relative path is relative to."""
    repeatable: bool = False
    bare: str | None = None
    """The value of the option where the command line gives it none; None: it must have one."""

    def read(self, text: str, **context: Any) -> Any:
        """Parse a text. Raises: OptionError: with what is allowed."""
        name = f"pytest_gpucluster.{self.parse}"
        parse = pkgutil.resolve_name(name) if isinstance(self.parse, str) else self.parse
        return parse(text, **({self.takes: context[self.takes]} if self.takes else {}))

    @property
    def flag(self) -> str:
        return f"--gpucluster-{self.name}"

    @property
    def dest(self) -> str:
        return f"gpucluster_{self.name.replace('-', '_')}"

    @property
    def variable(self) -> str:
        return self.dest.upper()


def _path(text: str, base: Path) -> Path:
    if not text.strip():
        raise OptionError("no path")
    return base / os.path.expanduser(text)


def _description(text: str, base: Path) -> str:
    """Return the name of a simulated cluster, or the path of a file."""
    return str(_path(text, base)) if Path(text).suffix in (".yaml", ".yml") else text


OPTIONS = (
    _Option(
        name="device",
        metavar="DEVICE",
        default="cuda",
        parse=one_of(*DEVICES),
        help="cuda; cpu for a rehearsal with gloo, small sizes and the cpu-rehearsal limits; or simulated, for the "
        "cluster of --gpucluster-simulate (default: cuda)",
    ),
    _Option(
        name="simulate",
        metavar="WHAT",
        parse=_description,
        takes="base",
        help="the cluster to simulate, with --gpucluster-device=simulated: a shape such as 2x8xH100, or a YAML file; "
        "nothing is accepted there",
    ),
    _Option(
        name="expect",
        metavar="NODESxGPUS[xSKU]",
        parse="agreement.preflight:Expectation.parse",
        help="the cluster that was ordered, such as 2x8xH100; anything else is an error before the first test",
    ),
    _Option(
        name="thresholds",
        metavar="FILE",
        parse=_path,
        takes="base",
        help="a YAML file of limits laid over the shipped thresholds.yaml, limit by limit",
    ),
    _Option(name="sku", metavar="NAME", help="judge by the limits of this SKU, whatever the GPU calls itself"),
    _Option(
        name="profile",
        metavar="PROFILE",
        default="full",
        parse=one_of(*PROFILES),
        help="which profile of the suite's workloads.yaml to measure with: quick, full or soak; on cpu it is always "
        "cpu (default: full)",
    ),
    _Option(
        name="workload",
        metavar="KEY=VALUE",
        parse="config.workload_loader:Override.parse",
        takes="origin",
        repeatable=True,
        help="change one value of the profile, such as matmul.sizes=8192,16384 or matmul.window=5s; as often as "
        "needed, in the ini file one a line, in the environment separated by ;",
    ),
    _Option(
        name="report-dir",
        metavar="DIR",
        default="gpucluster-report",
        parse=_path,
        takes="base",
        help="where each run leaves its own folder (default: gpucluster-report)",
    ),
    _Option(
        name="deadline",
        metavar="SECONDS",
        default="300",
        parse=positive_seconds,
        help="the longest that a phase of one test may take, unless it has its own deadline marker (default: 300)",
    ),
    _Option(
        name="require",
        metavar="CRITERIA",
        parse=lambda text: tuple(filter(None, map(str.strip, text.split(",")))),
        default="",
        help="criteria that must have run, by name, separated by commas, on top of those that the topology requires",
    ),
    _Option(
        name="timeouts",
        metavar="NAME=SECONDS,...",
        parse=Timeouts.parse,
        default="",
        help=f"change waiting times: {', '.join(Timeouts.__dataclass_fields__)}",
    ),
    _Option(
        name="data",
        metavar="NAME=PATH",
        parse="session.selection:read_data",
        takes="base",
        repeatable=True,
        help="data to train with: images=FOLDER, function_calls=FILE[@sha256:HEX] or function_calls=ORG/NAME[@REVISION]"
        " of the hub; as often as needed, in the ini file one a line, in the environment separated by ;",
    ),
    _Option(
        name="model",
        metavar="PATH|NAME[@REVISION]",
        parse="session.selection:read_model",
        takes="base",
        help="the pretrained model to fine-tune: a folder with its config.json, or a name on the hub",
    ),
    _Option(
        name="scratch",
        metavar="DIR",
        parse=_path,
        takes="base",
        help="an existing folder for checkpoints, on a file system that all ranks share; without it they go into the "
        "run's folder",
    ),
    _Option(
        name="resume",
        metavar="yes|no",
        default="no",
        parse=one_of("yes", "no"),
        bare="yes",
        help="go on from the newest checkpoint in the scratch folder; without a value it means yes (default: no)",
    ),
    _Option(
        name="reference-curve",
        metavar="FILE",
        parse=_path,
        takes="base",
        help="a reference curve of the loss, made by gpucluster lora reference-curve; leaving its band is a failure",
    ),
    _Option(
        name="baseline",
        metavar="JOURNAL",
        parse=journal_value,
        takes="base",
        help="an earlier run, as its journal.jsonl or its folder; a criterion also fails when it is worse than there, "
        "beyond noise and by more than --gpucluster-baseline-fail",
    ),
    _Option(
        name="baseline-fail",
        metavar="PERCENT",
        default="3%",
        parse="analysis.compare:allowance",
        help="by how much a value may be worse than in the baseline, in percent of that (default: 3 percent)",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The resolved settings of a run."""

    settings: Mapping[str, Setting]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.settings[name].value
        except KeyError:
            raise AttributeError(name) from None

    def to_json(self) -> dict[str, dict[str, str | None]]:
        """Return name -> value and origin as text, for the journal's header."""
        return {
            name: {"value": None if setting.value is None else _as_text(setting.value), "origin": setting.origin}
            for name, setting in self.settings.items()
        }


def register(parser: pytest.Parser) -> None:
    """Add the options and ini settings to pytest's parser."""
    group = parser.getgroup("gpucluster", "acceptance of GPU clusters (pytest-gpucluster)")
    parser.addini("gpucluster", "turn pytest-gpucluster on for this project", type="bool", default=False)
    for option in OPTIONS:
        group.addoption(
            option.flag,
            dest=option.dest,
            metavar=option.metavar,
            action="append" if option.repeatable else "store",
            default=None,
            help=option.help,
            **({} if option.bare is None else {"nargs": "?", "const": option.bare}),
        )
        kind: Literal["linelist", "string"] = "linelist" if option.repeatable else "string"
        parser.addini(option.dest, f"{option.help} (as {option.flag})", type=kind, default=None)


def add_suite(early_config: pytest.Config, args: list[str]) -> None:
    """Give pytest the acceptance suite where a command of this package has started it without a path."""
    paths = early_config.known_args_namespace.file_or_dir
    if EXIT_NOTES in os.environ and not paths:
        args.append(str(find_suite()))
        paths.append(args[-1])  # pytest loads its conftest before it reads the arguments again


def asked_for(early_config: pytest.Config, args: list[str]) -> bool:
    """Return whether the plugin will take part, from raw command-line arguments and the ini file alone."""
    paths = early_config.known_args_namespace.file_or_dir
    return any(arg.startswith("--gpucluster-") for arg in args) or _by_ini_or_suite(early_config, paths)


def _by_ini_or_suite(config: pytest.Config, paths: Sequence[str]) -> bool:
    if config.getini("gpucluster") or any(_ini(config, option) for option in OPTIONS):
        return True
    return suite_of(paths, config.invocation_params.dir) is not None


def active(config: pytest.Config) -> bool:
    """Return whether the plugin takes part in this session."""
    if any(getattr(config.option, option.dest, None) is not None for option in OPTIONS):
        return True
    return _by_ini_or_suite(config, config.args)


def resolve(config: pytest.Config, environ: Mapping[str, str] = os.environ) -> Settings:
    """Resolve every option.

    Raises:
        OptionError: names every wrong setting, its origin, the value found and the values allowed.
    """
    found: dict[str, Setting] = {}
    complaints = []
    for option in OPTIONS:
        raws, origin, shown = _raw(config, option, environ)
        values: list[Any] = []
        for raw in raws:
            try:
                values.append(option.read(raw, origin=f"{origin}: {shown(raw)}", base=_base(config, origin)))
            except OptionError as error:
                complaints.append(f"{shown(raw)}: {error}")
        value: Any = tuple(values) if option.repeatable else next(iter(values), None)
        # Which of several values of a key counts must not depend on their order.
        for key, count in Counter(each.key for each in values if option.repeatable).items():
            complaints += [f"{shown(f'{key}=...')}: {key} is given {count} times"] if count > 1 else []
        found[option.name.replace("-", "_")] = Setting(value=value, origin=origin)
    complaints += _without_effect(found)
    if found["sku"].value == "cpu-rehearsal" and found["device"].value != "cpu":
        complaints.append(
            "--gpucluster-sku cpu-rehearsal: its limits say nothing about a GPU; leave the option out, or name the SKU "
            "that the GPU is"
        )
    if complaints:
        raise OptionError("\n".join(complaints))
    return Settings(settings=found)


def defaults() -> Settings:
    """Return the settings of a run whose options have not been read, or are wrong."""
    found: dict[str, Setting] = {}
    for option in OPTIONS:
        value: Any = () if option.repeatable else None
        if option.default is not None:
            value = option.read(option.default, origin="default", base=Path())
        found[option.name.replace("-", "_")] = Setting(value=value, origin="default")
    return Settings(settings=found)


def report_directory(config: pytest.Config, environ: Mapping[str, str] = os.environ) -> Path:
    """Return where reports go, also where another setting is wrong."""
    option = next(option for option in OPTIONS if option.name == "report-dir")
    [raw], origin, _ = _raw(config, option, environ)
    return _base(config, origin) / (raw or "gpucluster-report")


def _base(config: pytest.Config, origin: str) -> Path:
    """Return what a path is relative to: as everywhere in pytest, the ini file for what the ini file says."""
    return config.inipath.parent if origin == "ini" and config.inipath is not None else Path()


def _without_effect(found: Mapping[str, Setting]) -> list[str]:
    """Complain about options that do nothing without another one, and about a simulation of nothing."""
    device, simulate = found["device"], found["simulate"]
    complaints = []
    if device.value == "simulated" and not simulate.value:
        complaints.append(
            f"--gpucluster-device=simulated ({device.origin}): no cluster is described; add "
            "--gpucluster-simulate=2x8xH100, another shape, or a YAML file"
        )
    elif device.value != "simulated" and simulate.value is not None:
        complaints.append(
            f"--gpucluster-simulate ({simulate.origin}): does nothing without --gpucluster-device=simulated, and the "
            f"device is {device.value}"
        )
    return complaints + [
        f"--gpucluster-{name.replace('_', '-')} ({found[name].origin}): does nothing without --gpucluster-{needed}, "
        "which is not given"
        for name, needed in (("resume", "scratch"), ("baseline_fail", "baseline"))
        if found[name].origin != "default"
        and found[name].value not in (None, "no")
        and found[needed].origin == "default"
    ]


def _as_text(value: Any) -> str:
    if not isinstance(value, tuple):
        return str(value)
    names = all(isinstance(part, str) for part in value)
    return (", " if names else "; ").join(map(str, value))


def _ini(config: pytest.Config, option: _Option) -> list[str]:
    value = config.getini(option.dest)
    return [str(part) for part in value] if isinstance(value, list) else [str(value)] if value else []


def _raw(
    config: pytest.Config, option: _Option, environ: Mapping[str, str]
) -> tuple[list[str], str, Callable[[str], str]]:
    """Return the values as written, their origin, and how to show such a value with its place."""
    command_line = getattr(config.option, option.dest, None)
    if command_line is not None:
        given = [str(part) for part in command_line] if option.repeatable else [str(command_line)]
        return given, "command line", lambda text: f"{option.flag} {text}"
    if option.variable in environ:
        text = environ[option.variable]
        given = [part.strip() for part in text.split(";") if part.strip()] if option.repeatable else [text]
        return given, "environment", lambda text: f"{option.variable}={text}"
    given = _ini(config, option)
    if given:
        return given, "ini", lambda text: f"{config.inipath}: {option.dest} = {text}"
    return [] if option.default is None else [option.default], "default", lambda text: f"{option.flag} (default)"
