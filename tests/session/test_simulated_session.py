"""A session on a simulated cluster asks for GPUs and limits as on a real one; its groups are gloo's."""

import pytest
import sessions
import torchrun

SIMULATED = "--gpucluster-device=simulated"
SUITE = {
    "test_it.py": """
        import os
        import pytest

        @pytest.mark.needs_gpu
        @pytest.mark.criterion("it")
        def test_gpu(cluster, gpu, measure):
            assert cluster.has_gpus
            assert (cluster.device.type, cluster.backend, gpu.sku) == ("cpu", "gloo", "H100 SXM")
            assert cluster.hostname == f"gpu-0{cluster.node_rank}"
            measure("matmul.bf16.tflops", float(os.environ["TFLOPS"]), unit="TFLOPS", m=8192, n=8192, k=8192)

        @pytest.mark.needs_hardware
        @pytest.mark.criterion("of a real GPU")
        def test_real(measure):
            raise AssertionError("it has run")

        def test_released(cluster):
            assert cluster.rank == 0 or "FAILS" not in os.environ, "planted"
            cluster.barrier()

        def test_after(cluster):
            assert cluster.all_gather_object(cluster.rank) == [0, 1]
        """
}


@pytest.mark.parametrize(
    ("variables", "end", "verdicts"),
    [
        ({"TFLOPS": "750"}, ("SIMULATED", 0), ["passed", "skipped", "passed", "passed"]),
        ({"TFLOPS": "10", "FAILS": "1"}, ("REJECTED", 1), ["failure", "skipped", "failure", "passed"]),
    ],
    ids=["healthy", "missed, and one rank fails before a barrier"],
)
def test_it_runs_as_on_gpus_and_each_word_says_that_it_is_simulated(tmp_path, variables, end, verdicts):
    words = (SIMULATED, "--gpucluster-simulate=2x1xH100", "--gpucluster-expect=2x1xH100")
    run = torchrun.torchrun(tmp_path, SUITE, *words, ranks=1, hosts=("a", "b"), deadline=20, environment=variables)
    assert run.end[:2] == end, run.output
    assert [verdict.partition(":")[0] for verdict in run.verdicts.values()] == verdicts
    assert (run.journal.run.kind, run.journal.hosts, run.journal.sku) == ("SIMULATED", ("gpu-00", "gpu-01"), "H100 SXM")
    assert run.journal.run.options["profile"] == ("full", "default")
    line = "SIMULATED (no" if end[1] == 0 else "SIMULATED, REJECTED (no"
    assert f"\n{line} statement about hardware), exit code {end[1]}: " in run.output


@pytest.mark.parametrize(
    ("simulate", "code", "message"),
    [("2x8xH9000", 4, "H9000"), ("no.yaml", 4, "no.yaml"), ("1x1xH100", 4, "1 nodes with 1 GPUs")],
    ids=["no such GPU", "no file", "too small"],
)
def test_a_cluster_that_cannot_be_simulated_is_refused_on_every_rank(tmp_path, simulate, code, message):
    run = torchrun.torchrun(tmp_path, SUITE, SIMULATED, f"--gpucluster-simulate={simulate}", by_command=True)
    assert run.exits == [code], run.output
    assert message in run.output
    assert run.end[:2] == ("BROKEN", code)


@pytest.mark.parametrize(("count", "options"), [(1, []), (2, ["-n2", "--dist=each"])], ids=["one process", "workers"])
def test_it_needs_no_launcher(project, count, options):
    project.suite("""
        import pytest

        @pytest.mark.single_gpu
        def test_it(gpu, measure):
            measure("inventory.ranks", gpu.index, unit="ranks", record_only=True)
    """)
    left = project.run_apart(SIMULATED, f"--gpucluster-simulate=1x{count}xH100", *options, device=None)
    assert left.end == ("SIMULATED", 0), left.output
    values = left.journal.results[0].measurements[0].values
    assert sorted(values.values()) == list(range(count))


def test_it_cannot_be_left_over_in_a_shell(project, monkeypatch):
    sessions.clean_environment(monkeypatch)
    monkeypatch.setenv("GPUCLUSTER_SIMULATE", "2x8xH100")
    project.suite("def test_it(): pass")
    left = project.run("--gpucluster-device=cpu", device=None)
    assert left.exit == 4
    assert "--gpucluster-simulate (environment): does nothing without --gpucluster-device=simulated" in left.stderr
