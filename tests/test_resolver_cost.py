"""perf/resolver.py: resolvers that are made up do what they are said to do, and what did not connect is no figure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PERF = Path(__file__).parent.parent / "perf"
sys.path.insert(0, str(PERF))  # programs, not a package
try:
    import resolver
finally:
    sys.path.remove(str(PERF))

ADDRESS = "::ffff:127.0.0.1"
READY = "import sys; print('ready', flush=True); sys.stdin.read()"
WAYS = {way.name: way for way in resolver.WAYS}
PLAIN, _, LINE, OF_STORE = resolver.WAYS


def name_of(address: str, folder: Path, servers: tuple[str, ...], hosts: str = "", seconds: float = 30.0) -> str:
    """The name that a process finds for an address."""
    command = resolver.seen_by(["getent", "hosts", address], folder, servers, hosts)
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False).stdout


def test_made_up_resolvers_answer_or_do_not_and_a_line_in_hosts_helps_in_one_form_alone(tmp_path: Path) -> None:
    if why_not := resolver.why_not_made_up():
        pytest.skip(f"no made-up resolvers here: {why_not}")
    with resolver.nameservers(answer_seconds=0.0):
        assert "node.example" in name_of(ADDRESS, tmp_path, (resolver._ANSWERS,))
        # As /etc/hosts has it everywhere: it is not taken for the form in which the store looks it up.
        with pytest.raises(subprocess.TimeoutExpired):
            name_of(ADDRESS, tmp_path, (resolver._SILENT,), "127.0.0.1 gpu-001", seconds=0.5)
        assert "gpu-001" in name_of(ADDRESS, tmp_path, (resolver._SILENT,), LINE.hosts)


@pytest.mark.parametrize(
    ("way", "store", "clients"),
    [(PLAIN, "None", "None"), (OF_STORE, "'attempts:0'", "None"), (resolver.WAYS[1], *["'timeout:1 attempts:1'"] * 2)],
    ids=["plain", "the store alone", "all"],
)
def test_each_process_is_given_what_is_said(
    way: resolver.Way, store: str, clients: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RES_OPTIONS", raising=False)
    check = "import os; assert os.environ.get('RES_OPTIONS') == {}, os.environ.get('RES_OPTIONS')\n"
    monkeypatch.setattr(resolver, "_STORE", check.format(store) + READY)
    monkeypatch.setattr(resolver, "_CLIENTS", check.format(clients) + "print(1.5)")
    assert resolver.connect_seconds(4, way) == 1.5


@pytest.mark.parametrize(
    ("store", "clients", "said"),
    [
        ("raise SystemExit(3)", "", "the store did not come up: .* ended with 3"),
        (READY, "raise SystemExit('3 of 4 have not connected')", "4 ranks, plain: 3 of 4 have not connected"),
    ],
    ids=["no store", "some have not connected"],
)
def test_what_has_not_connected_is_no_figure(
    store: str, clients: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolver, "_STORE", store)
    monkeypatch.setattr(resolver, "_CLIENTS", clients)
    with pytest.raises(RuntimeError, match=said):
        resolver.connect_seconds(4, PLAIN)


def test_what_cannot_be_measured_here_is_said_and_no_figure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []
    monkeypatch.setattr(
        resolver, "connect_seconds", lambda ranks, way, servers: asked.append((ranks, way.name, servers)) or 2.0
    )
    found = resolver.table(["as it is", "slow"], [8], "must be superuser")
    out = capsys.readouterr().out
    assert "| slow: answers after 100 ms | | not measured: must be superuser |" in out
    assert [one["resolver"] for one in found] == ["as it is"]
    assert found[0]["seconds"] == [2.0, 2.0, None, 2.0]
    asked.clear()
    resolver.table(["late"], [8, 64], "")
    assert {ranks for ranks, _, _ in asked} == {2}
    assert {servers for _, _, servers in asked} == {(resolver._SILENT, resolver._ANSWERS)}
