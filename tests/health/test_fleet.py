from __future__ import annotations

from typing import Any

import pytest
from patient import who

from pytest_gpucluster.errors import EnvironmentBroken, HardwareFault
from pytest_gpucluster.health.fleet import require_uniform


def fleet(*changes: dict[str, Any]) -> list[dict[str, Any]]:
    """One GPU on each of several hosts."""
    return [{**who(rank, **change), "host": f"gpu-{rank:02}"} for rank, change in enumerate(changes)]


def test_equal_gpus_are_a_fleet() -> None:
    require_uniform(fleet({}, {}, {}))
    # A card that cannot be cut into slices does not say whether it is.
    require_uniform(fleet({"mig": None}, {"mig": None}))


@pytest.mark.parametrize(
    ("key", "odd", "words"),
    [
        ("vbios", "96.00.30", "VBIOS: 96.00.30 on rank 2 (gpu-02); 96.00.74.00.01 on ranks 0-1, 3 (gpu-00"),
        ("memory_bytes", 79 * 10**9, "device memory in bytes: 79000000000 on rank 2 (gpu-02)"),
        ("power_limit_watts", 650.0, "enforced power limit in W: 650.0 on rank 2 (gpu-02)"),
        ("ecc", False, "ECC: False on rank 2 (gpu-02)"),
        ("mig", True, "MIG: True on rank 2 (gpu-02)"),
    ],
)
def test_the_odd_ranks_are_named_with_their_values_and_hosts(key: str, odd: Any, words: str) -> None:
    with pytest.raises(HardwareFault) as caught:
        require_uniform(fleet({}, {}, {key: odd}, {}))
    assert words in str(caught.value)
    assert "what to do: " in str(caught.value)


def test_the_odd_gpus_are_told_by_all_their_names_and_no_others() -> None:
    with pytest.raises(HardwareFault) as caught:
        require_uniform(fleet({}, {}, {"vbios": "x", "serial": "odd"}, {}))
    names = [line for line in str(caught.value).splitlines() if line.startswith("- ")]
    assert names == ["- rank 2: GPU 2 (GPU-2, serial odd, PCI 00000000:3B:00.0) on gpu-02"]


def test_of_many_odd_gpus_the_first_are_named_and_the_rest_counted() -> None:
    with pytest.raises(HardwareFault) as caught:
        require_uniform(fleet(*[{}] * 21, *[{"vbios": "x"}] * 20))
    names = [line for line in str(caught.value).splitlines() if line.startswith("- ")]
    assert len(names) == 17
    assert names[-1] == "- and 4 more"


def test_all_differences_are_told_at_once() -> None:
    with pytest.raises(HardwareFault) as caught:
        require_uniform(fleet({}, {"vbios": "x", "ecc": False}))
    assert "VBIOS" in str(caught.value).splitlines()[0]
    assert "ECC" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param([{"vbios": None}, {"vbios": None}], "VBIOS: not known of ranks 0-1", id="of nobody"),
        pytest.param([{}, {"power_limit_watts": None}], "power limit in W: not known of rank 1", id="of one"),
        pytest.param([{}, {"mig": None}], "MIG: not known of rank 1", id="of one that should"),
    ],
)
def test_what_is_not_known_is_never_taken_for_equal(changes: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(EnvironmentBroken) as caught:
        require_uniform(fleet(*changes))
    assert words in str(caught.value)


def test_a_difference_weighs_more_than_what_is_not_known() -> None:
    with pytest.raises(HardwareFault):
        require_uniform(fleet({"vbios": None}, {"vbios": "x"}, {"vbios": "y"}))
