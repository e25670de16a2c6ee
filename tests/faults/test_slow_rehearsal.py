"""A rehearsal on a machine that is too slow for it is skipped in part, and never rejected or broken for that."""

import pytest
from torchrun import torchrun

RANK_1 = "rank 1 (node-a)"
SUITE = {
    "test_it.py": """
        import subprocess
        import threading
        import time
        import pytest
        from stamps import RANK, all_reduce, meet
        from pytest_gpucluster.errors import InconclusiveMeasurement
        from pytest_gpucluster.metrics.sampling import Series

        def noisy(value):
            why = "it varies" if RANK else ""
            return Series(samples=(value,) * 3, median=value, low=value, high=value, inconclusive=why)

        def spin(seconds):
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                pass

        @pytest.fixture
        def slow_setup():
            spin(600)

        @pytest.mark.criterion("inventory")
        def test_inventory(measure):
            measure("inventory.ranks", 2, unit="ranks", record_only=True)

        @pytest.mark.criterion("gpu.compute")
        def test_gpu_computes(measure):
            measure("gpu.usable_dtypes", 4, unit="dtypes")

        @pytest.mark.criterion("matmul")
        @pytest.mark.deadline(1)
        def test_collectives_go_on(cluster):
            while True:
                spin(0.05)
                all_reduce(cluster)

        def test_after_collectives(cluster):
            meet(cluster, "collectives")

        @pytest.mark.criterion("hbm")
        @pytest.mark.deadline(0.5)
        def test_computes(cluster):
            spin(600)

        @pytest.mark.criterion("burn_in")
        @pytest.mark.deadline(0.5)
        def test_slow_setup(slow_setup):
            pass

        @pytest.mark.criterion("hbm")
        @pytest.mark.deadline(1)
        def test_children_compute(cluster):
            child = subprocess.Popen(["sh", "-c", "while :; do :; done"])
            try:
                child.wait()
            finally:
                child.kill()
                child.wait()

        @pytest.mark.criterion("matmul")
        def test_inconclusive(measure):
            measure("matmul.bf16.tflops", noisy(2.0), unit="TFLOPS")

        @pytest.mark.criterion("burn_in")
        def test_raises_that_it_is_inconclusive(cluster):
            if RANK == 1:
                raise InconclusiveMeasurement("one point only")
            all_reduce(cluster)

        @pytest.fixture
        def slow_teardown():
            yield
            spin(600)

        @pytest.mark.deadline(0.5)
        def test_slow_teardown(slow_teardown):
            pass

        @pytest.mark.criterion("hbm")
        def test_passes(measure):
            measure("hbm.copy.bandwidth", 2, unit="TB/s")

        @pytest.mark.deadline(1)
        @pytest.mark.hangs
        def test_hangs(cluster):
            if RANK == 1:
                spin(600)
            all_reduce(cluster)

        @pytest.mark.deadline(1)
        @pytest.mark.hangs
        def test_hangs_while_a_thread_spins(cluster):
            lock = threading.Lock()
            lock.acquire()
            spinning = threading.Thread(target=spin, args=(2,), daemon=True)
            spinning.start()
            try:
                lock.acquire()
            finally:
                spinning.join()

        @pytest.mark.hangs
        @pytest.mark.criterion("matmul")
        def test_inconclusive_and_broken(measure):
            measure("matmul.bf16.tflops", noisy(2.0), unit="TFLOPS")
            raise OSError("no space left")

        @pytest.mark.hangs
        @pytest.mark.criterion("matmul")
        def test_below_the_limit(measure):
            measure("matmul.bf16.tflops", noisy(1e-9), unit="TFLOPS")

        def test_after(cluster):
            meet(cluster, "all")
    """
}
SLOW = [
    "test_collectives_go_on",
    "test_computes",
    "test_slow_setup",
    "test_children_compute",
    "test_inconclusive",
    "test_raises_that_it_is_inconclusive",
    "test_slow_teardown",
]
INI = "markers =\n    hangs\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return torchrun(
        tmp_path_factory.mktemp("slow"), SUITE, "-m", "not hangs", deadline=60.0, timeouts="stuck=30", ini=INI
    )


@pytest.mark.parametrize("name", SLOW)
def test_what_is_too_slow_here_is_skipped_with_the_reason_and_names_no_culprit(run, name):
    assert run.verdicts[name].startswith("skipped: too slow"), run.body(name)
    result = next(result for result in run.journal.results if result.nodeid.endswith(name))
    assert (result.too_slow, list(result.culprits)) == (True, [])


def test_the_next_tests_pass_on_a_fresh_group_and_the_run_is_a_rehearsal(run):
    assert {run.verdicts[name] for name in ("test_after_collectives", "test_passes", "test_after")} == {"passed"}
    assert run.end == ("REHEARSED", 0, "rank 0")
    assert run.exits == [0]
    assert f"{len(SLOW)} too slow" in run.output.splitlines()[-1]
    assert "of them" not in run.output
    assert run.left_over == []


def test_a_hang_and_a_value_below_its_limit_are_no_slowness(tmp_path):
    run = torchrun(tmp_path, SUITE, "-m", "hangs", deadline=60.0, ini=INI)
    assert run.verdicts["test_hangs"].startswith(f"error: {RANK_1}: hangs at test_it.py:")
    assert run.verdicts["test_hangs_while_a_thread_spins"].startswith("error: ranks 0-1: hangs at test_it.py:")
    assert run.verdicts["test_inconclusive_and_broken"].startswith("error: all 2 ranks: OSError: ")
    assert run.verdicts["test_below_the_limit"].startswith("failure: ")
    assert run.end == ("REJECTED", 1, "rank 0")
