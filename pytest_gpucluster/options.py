"""Settings: command line over environment over ini over default, each with its origin.

The plugin is *active* only when this project's configuration, an ini setting or a ``--gpucluster-*`` option of the
command line asks for it. An environment variable alone never turns it on: it may be left over in an operator's shell.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pytest_gpucluster.errors import OptionError

if TYPE_CHECKING:
    import pytest

DEVICES = ("cuda", "cpu")
PROFILES = ("quick", "full", "soak")


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
            values[name] = _positive_seconds(value)
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One resolved value and where it came from ("command line", "environment", "ini", "default")."""

    value: Any
    origin: str


@dataclass(frozen=True, kw_only=True)
class _Option:
    """One option. A repeatable one is given as often as needed; it has one value a line in the ini file, and ``;``
    between the values in the environment. Its value is a tuple, and ``parse`` also takes where each one was written."""

    name: str
    metavar: str
    help: str
    default: str | None = None
    parse: Callable[..., Any] = str
    repeatable: bool = False

    @property
    def flag(self) -> str:
        return f"--gpucluster-{self.name}"

    @property
    def dest(self) -> str:
        return f"gpucluster_{self.name.replace('-', '_')}"

    @property
    def variable(self) -> str:
        return self.dest.upper()


def _positive_seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise OptionError(f"{text!r} is not a number of seconds") from None
    if not 0 < value < float("inf"):
        raise OptionError(f"{text!r} is not a positive number of seconds")
    return value


def _one_of(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise OptionError(f"{text!r} is not allowed; choose one of: {', '.join(allowed)}")
        return text

    return parse


def _shape(text: str) -> Any:
    from pytest_gpucluster.agreement.preflight import Expectation  # a session without the option pays nothing

    return Expectation.parse(text)


def _override(text: str, origin: str) -> Any:
    from pytest_gpucluster.workload_file import Override  # it reads YAML: a session without the option pays nothing

    return Override.parse(text, origin=origin)


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (name.strip() for name in text.split(","))))


OPTIONS = (
    _Option(
        name="device",
        metavar="DEVICE",
        default="cuda",
        parse=_one_of(*DEVICES),
        help="cuda, or cpu for a rehearsal with gloo, small sizes and the cpu-rehearsal limits (default: cuda)",
    ),
    _Option(
        name="expect",
        metavar="NODESxGPUS[xSKU]",
        parse=_shape,
        help="the cluster that was ordered, such as 2x8xH100; anything else is an error before the first test",
    ),
    _Option(
        name="thresholds",
        metavar="FILE",
        parse=Path,
        help="a YAML file of limits laid over the shipped thresholds.yaml, limit by limit",
    ),
    _Option(name="sku", metavar="NAME", help="judge by the limits of this SKU, whatever the GPU calls itself"),
    _Option(
        name="profile",
        metavar="PROFILE",
        default="full",
        parse=_one_of(*PROFILES),
        help="which profile of the suite's workloads.yaml to measure with: quick, full or soak; on cpu it is always "
        "cpu (default: full)",
    ),
    _Option(
        name="workload",
        metavar="KEY=VALUE",
        parse=_override,
        repeatable=True,
        help="change one value of the profile, such as matmul.sizes=8192,16384 or matmul.window=5s; as often as "
        "needed, in the ini file one a line, in the environment separated by ;",
    ),
    _Option(
        name="report-dir",
        metavar="DIR",
        default="gpucluster-report",
        parse=Path,
        help="where each run leaves its own folder (default: gpucluster-report)",
    ),
    _Option(
        name="deadline",
        metavar="SECONDS",
        default="300",
        parse=_positive_seconds,
        help="the longest that a phase of one test may take, unless it has its own deadline marker (default: 300)",
    ),
    _Option(
        name="require",
        metavar="CRITERIA",
        parse=_names,
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

    def chosen(self) -> list[str]:
        """Return each setting that is no default, as ``name=value (origin)``."""
        return [
            f"{name}={_as_text(setting.value)} ({setting.origin})"
            for name, setting in self.settings.items()
            if setting.origin != "default"
        ]


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
        )
        kind: Literal["linelist", "string"] = "linelist" if option.repeatable else "string"
        parser.addini(option.dest, f"{option.help} (as {option.flag})", type=kind, default=None)


def asked_for(early_config: pytest.Config, args: list[str]) -> bool:
    """Tell whether the plugin will take part, from raw command-line arguments and the ini file alone."""
    return any(arg.startswith("--gpucluster-") for arg in args) or _in_ini(early_config)


def _in_ini(config: pytest.Config) -> bool:
    return bool(config.getini("gpucluster")) or any(_ini(config, option) for option in OPTIONS)


def active(config: pytest.Config) -> bool:
    """Tell whether the plugin takes part in this session."""
    if any(getattr(config.option, option.dest, None) is not None for option in OPTIONS):
        return True
    return _in_ini(config)


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
                values.append(option.parse(raw, f"{origin}: {shown(raw)}") if option.repeatable else option.parse(raw))
            except OptionError as error:
                complaints.append(f"{shown(raw)}: {error}")
        value: Any = next(iter(values), None)
        if option.repeatable:
            value = tuple(values)
            complaints += _repeated(values, shown)
        if isinstance(value, Path):
            value = _base(config, origin) / value
        found[option.name.replace("-", "_")] = Setting(value=value, origin=origin)
    if complaints:
        raise OptionError("\n".join(complaints))
    return Settings(settings=found)


def report_directory(config: pytest.Config, environ: Mapping[str, str] = os.environ) -> Path:
    """Return where reports go, also where another setting is wrong."""
    option = next(option for option in OPTIONS if option.name == "report-dir")
    [raw], origin, _ = _raw(config, option, environ)
    return _base(config, origin) / (raw or "gpucluster-report")


def _base(config: pytest.Config, origin: str) -> Path:
    """Return what a path is relative to: as everywhere in pytest, the ini file for what the ini file says."""
    return config.inipath.parent if origin == "ini" and config.inipath is not None else Path()


def _as_text(value: Any) -> str:
    if not isinstance(value, tuple):
        return str(value)
    names = all(isinstance(part, str) for part in value)
    return (", " if names else "; ").join(map(str, value))


def _repeated(values: Sequence[Any], shown: Callable[[str], str]) -> list[str]:
    """Complain about keys that come twice: which of the values counts must not depend on their order."""
    keys = [value.key for value in values]
    return [
        f"{shown(f'{key}=...')}: {key} is given {keys.count(key)} times"
        for key in dict.fromkeys(keys)
        if keys.count(key) > 1
    ]


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
