"""Does the GPU hold its clocks under load, and is it cool enough for that?"""

from __future__ import annotations

from collections.abc import Iterator

from pytest_gpucluster.health.situation import Situation
from pytest_gpucluster.metrics.finding import Finding

BAD_REASONS = {
    "hw_slowdown": "hardware slowdown",
    "hw_thermal": "hardware thermal slowdown",
    "sw_thermal": "software thermal slowdown",
    "hw_power_brake": "power brake by the power supply",
}
"""Throttle reasons of a GPU that is too hot or short of power. A healthy one at its power limit shows sw_power_cap."""

_EXPECTED = {"sw_power_cap", "gpu_idle"}


def check(situation: Situation) -> Iterator[Finding]:
    """Look at the throttle reasons under load, and at the temperature beside the card's own slowdown limit."""
    seen = {reason for reasons in situation.loaded("throttle.reasons") for reason in reasons}
    bad = [f"{words} ({name})" for name, words in BAD_REASONS.items() if name in seen]
    if bad:
        hottest = max(situation.loaded("temperature.gpu"), default=None)
        at = "" if hottest is None else f", at up to {hottest} degC"
        yield situation.finding(
            "throttle",
            "hardware",
            f"clocks held down under load by: {', '.join(bad)}{at}",
            allowed="no thermal and no hardware slowdown",
            remedy="look at airflow or coolant, heat sink and power supplies of this node",
        )
    if "sw_power_cap" in seen:
        yield situation.finding(
            "power_cap",
            "note",
            "clocks held down by the power limit (sw_power_cap), as with any healthy GPU under full load",
            allowed="anything",
            remedy="nothing",
        )
    others = sorted(seen - set(BAD_REASONS) - _EXPECTED)
    if others:
        yield situation.finding(
            "clocks_held",
            "note",
            f"clocks held down under load by: {', '.join(others)}",
            allowed="anything, as long as the GPU is fast enough",
            remedy="undo clocks if somebody has set them: `nvidia-smi -rgc`, `nvidia-smi -rac`",
        )
    yield from _temperature(situation)


def _temperature(situation: Situation) -> Iterator[Finding]:
    hottest = max(situation.loaded("temperature.gpu"), default=None)
    limit = situation.before.get("temperature.slowdown")
    margins = situation.loaded("temperature.margin")
    if not limit and not margins and hottest is not None:
        yield situation.finding(
            "temperature_limit",
            "note",
            f"{hottest} degC under load, and NVML does not tell at which temperature this card slows down",
            allowed="anything: a card that slows down says so in its throttle reasons",
            remedy="compare with the data sheet, or update driver and nvidia-ml-py",
        )
    too_hot = ""
    # A limit of 0 is how some drivers say that the card has none.
    if limit and hottest is not None and hottest >= limit:
        too_hot = f"{hottest} degC under load"
        allowed = f"below {limit} degC, where this card slows down"
    elif margins and min(margins) <= 0:
        too_hot = f"{hottest} degC under load, {min(margins)} degC away from this card's slowdown limit"
        allowed = "more than 0 degC away from it"
    if too_hot:
        yield situation.finding(
            "temperature",
            "hardware",
            too_hot,
            allowed=allowed,
            remedy="look at airflow or coolant, heat sink and inlet temperature of this node",
        )
