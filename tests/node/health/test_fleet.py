from __future__ import annotations

from typing import Any

import pytest
from complaints import in_order
from patient import who

from pytest_gpucluster.errors import EnvironmentBroken, HardwareFault
from pytest_gpucluster.node.health.examination import require_uniform


def fleet(*changes: dict[str, Any]) -> list[dict[str, Any]]:
    """One GPU on each of several hosts."""
    return [{**who(rank, **change), "host": f"gpu-{rank:02}"} for rank, change in enumerate(changes)]


def test_equal_gpus_are_a_fleet() -> None:
    require_uniform(fleet({}, {}, {}))
    # A card that cannot be cut into slices does not say whether it is.
    require_uniform(fleet({"mig": None}, {"mig": None}))


def test_the_odd_ranks_are_named_with_their_values_and_hosts() -> None:
    odd = {"vbios": "96.00.30", "memory_bytes": 79 * 10**9, "power_limit_watts": 650.0, "ecc": False, "mig": True}
    for key, value in odd.items():
        with pytest.raises(HardwareFault, match=rf"{value} on rank 2 \(gpu-02\)"):
            require_uniform(fleet({}, {}, {key: value}, {}))
    with pytest.raises(HardwareFault) as caught:
        require_uniform(fleet({}, {}, odd, {}))
    first, *rest = str(caught.value).splitlines()
    assert in_order(first, "VBIOS: 96.00.30 rank 2 (gpu-02); 96.00.74.00.01 ranks 0-1, 3 (gpu-00")
    assert "ECC" in "".join([first, *rest]), "all differences at once"
    with pytest.raises(HardwareFault):  # a difference weighs more than what is not known
        require_uniform(fleet({"vbios": None}, {"vbios": "x"}, {"vbios": "y"}))


def test_the_odd_gpus_are_reported_by_all_their_names_and_no_others() -> None:
    with pytest.raises(HardwareFault) as caught:
        require_uniform(fleet({}, {}, {"vbios": "x", "serial": "odd"}, {}))
    names = [line for line in str(caught.value).splitlines() if line.startswith("- ")]
    assert names == ["- rank 2: GPU 2 (GPU-2, serial odd, PCI 00000000:3B:00.0) on gpu-02"]


def test_what_is_not_known_is_never_taken_for_equal() -> None:
    for changes, words in (
        ([{"vbios": None}, {"vbios": None}], "VBIOS: ranks 0-1"),
        ([{}, {"power_limit_watts": None}], "power limit rank 1"),
        ([{}, {"mig": None}], "MIG: rank 1"),
    ):
        with pytest.raises(EnvironmentBroken) as caught:
            require_uniform(fleet(*changes))
        assert in_order(str(caught.value), words)
