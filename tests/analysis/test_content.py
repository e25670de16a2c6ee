"""A certificate holds every part of the cluster, every value with its limit, and what is not known."""

from __future__ import annotations

from made_records import DIGEST, Lines, journal_of, line_of, lines

from pytest_gpucluster.analysis.certificate import canonical, certificate_content


def made(found: Lines) -> dict:
    return certificate_content(journal_of(found), sha256=DIGEST)


def test_every_gpu_stands_in_its_node_with_all_that_identifies_it():
    content = made(lines())
    assert content["accepted"] is True
    assert content["missing"] == []
    assert [(node["host"], len(node["gpus"])) for node in content["nodes"]] == [("gpu-01", 8), ("gpu-02", 8)]
    known = line_of(lines(), "cluster")["ranks"][9]
    gpu = content["nodes"][1]["gpus"][1]
    assert gpu["rank"] == 9
    keys = ("uuid", "serial", "board_part_number", "vbios", "inforom", "gsp_firmware", "pci_bus_id", "name")
    assert [gpu[key] for key in keys] == [known["gpu"][key] for key in keys]
    assert content["nodes"][1]["versions"]["driver"] == known["versions"]["driver"]
    assert content["nodes"][1]["adapters"][1] == {
        "name": "mlx5_1",
        "guid": "a0:11",
        "board": "MT_838",
        "firmware": "28.39",
        "pci_bus_id": "0:11",
    }


def test_what_is_not_known_is_named():
    found = lines()
    ranks = line_of(found, "cluster")["ranks"]
    del ranks[2]["gpu"]["serial"]
    ranks[3]["gpu"]["serial"] = None
    ranks[8]["gpu"]["inforom"] = ""
    for rank in ranks[8:]:
        rank["versions"]["nccl"] = None
    telemetry = line_of(found, "test")["measurements"][-1]["telemetry"]
    del telemetry["8"]
    telemetry["0"]["adapters"][1]["guid"] = ""
    missing = [("serial", "ranks 2-3"), ("InfoROM", "rank 8"), ("GUID of mlx5_1", "gpu-01"), ("nccl", "gpu-02")]
    missing.append(("network adapters", "gpu-02"))
    texts = made(found)["missing"]
    assert [(text.startswith(what), text.endswith(of)) for text, (what, of) in zip(texts, missing, strict=True)] == (
        [(True, True)] * 5
    )


def test_any_journal_can_be_made_a_record_that_has_a_canonical_form():
    for name in ("cluster", "rehearsal", "broken", "hostile"):
        content = made(lines(name))
        assert canonical(content)
        assert (content["accepted"], bool(content["not_accepted_because"])) == (False, True)
    found = lines()
    line_of(found, "test")["measurements"][0].update(value="NaN", margin="-Infinity")
    first = made(found)["tests"][0]["measurements"][0]
    assert (first["value"], first["margin"]) == ("NaN", "-Infinity")


def test_a_merged_run_names_the_runs_that_it_is_made_of():
    found = lines()
    assert (made(found)["run"]["merged_from"], made(found)["run"]["expected"]) == ([], "2x8xH100")
    one = {"run_id": "a", "started_at": "2026-01-02", "verdict": "REJECTED", "journal": "x", "sha256": DIGEST}
    found[0]["merged_from"] = [{**one, "exit": 1}]
    content = made(found)
    assert content["run"]["merged_from"] == [one]
    assert content["accepted"] is True
    found[0]["merged_despite"] = ["other GPUs"]
    assert (made(found)["run"]["merged_despite"], made(found)["accepted"]) == (["other GPUs"], False)


def test_every_value_has_its_limit_its_margin_and_where_the_limit_comes_from():
    journal = journal_of(lines())
    content = certificate_content(journal, sha256=DIGEST)
    assert [test["nodeid"] for test in content["tests"]] == [result.nodeid for result in journal.results]
    with_limit = [each for test in content["tests"] for each in test["measurements"] if each["limit"]]
    assert with_limit
    assert all(each["limit"]["origin"] and each["limit"]["source"] for each in with_limit)
    first = next(each for each in with_limit if each["metric"] == "matmul.bf16.tflops")
    judged = next(
        one
        for result in journal.results
        for one in result.measurements
        if one.metric == "matmul.bf16.tflops" and one.limit
    )
    assert (first["value"], first["margin"], first["limit"]["min"]) == (judged.value, judged.margin, judged.limit.min)
    assert first["worst_gpu_uuid"] == journal.place(judged.worst_rank).gpu["uuid"]
