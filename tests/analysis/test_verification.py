"""A certificate is checked by its seal, by a digest kept elsewhere, and by its journal."""

import json

import pytest
from each import of_each
from made_records import lines, record, write_journal

from pytest_gpucluster.analysis import certificate as certificate_module
from pytest_gpucluster.analysis.certificate import (
    certificate_content,
    digest,
    journal_digest,
    journal_mismatches,
    read_certificate,
    seal,
    seal_problems,
)
from pytest_gpucluster.errors import JournalError


@pytest.fixture
def made(tmp_path):
    """A record of a journal on disk: (its path, the journal's path)."""
    journal = write_journal(tmp_path / "run", lines())
    sha256, run = journal_digest(journal)
    text, _ = seal(certificate_content(run, sha256=sha256), at="2026-01-02T03:04:05Z", by="", note="", version="0.1.0")
    (tmp_path / "a.json").write_text(text)
    return tmp_path / "a.json", journal


def resealed(path):
    """Seal what now stands in a file anew, as a forger would."""
    content = json.loads(path.read_text())
    content["sha256"] = digest(content["record"])
    path.write_text(json.dumps(content))
    return read_certificate(path)


def test_a_forged_seal_is_noticed_by_a_digest_from_elsewhere_and_by_the_journal(made):
    path, journal = made
    known = read_certificate(path).digest
    path.write_text(path.read_text().replace("gpu-01", "gpu-99"))
    document = resealed(path)
    assert seal_problems(document) == []
    [fault] = seal_problems(document, known_digest=known)
    assert f"not {known}" in fault
    sha256, run = journal_digest(journal)
    [fault] = journal_mismatches(document, run, sha256)
    assert "nodes[0].host, run.host" in fault


def test_a_certificate_of_another_journal_is_reported(made, tmp_path):
    path, _ = made
    found = lines()
    found[0]["run_id"] = "another"
    sha256, run = journal_digest(write_journal(tmp_path / "other", found))
    [fault] = journal_mismatches(read_certificate(path), run, sha256)
    assert "another journal" in fault


def test_a_journal_that_is_being_written_or_is_none_is_refused(made, monkeypatch):
    _, journal = made
    from pytest_gpucluster.journal import journal as journal_module

    def growing(path, slim):
        path.write_bytes(path.read_bytes() + b'{"type":"property","name":"a","value":"b"}\n')
        return journal_module.Journal

    monkeypatch.setattr(certificate_module, "read", growing)
    with pytest.raises(JournalError, match="being written"):
        journal_digest(journal)
    for path in (journal.parent / "none", journal.parent):
        with pytest.raises(JournalError, match=str(path)):
            journal_digest(path)


def _gpu_twice(content):
    first, second, *_ = content["nodes"][0]["gpus"]
    first["uuid"] = second["uuid"].upper()


@of_each(
    "case",
    [
        (lambda content: content["verdict"].update(word="REJECTED"), ""),
        (lambda content: content["tests"][0].update(outcome="failed"), "1 of its tests"),
        (lambda content: content["tests"][0]["measurements"][0].update(status="failed"), "1 of its values"),
        (lambda content: content.update(tests=[]), "none of its values"),
        (lambda content: content["nodes"][0]["gpus"].pop(), "2 nodes with 15 GPUs"),
        (_gpu_twice, "UUID"),
    ],
)
def test_a_record_that_was_changed_and_sealed_anew_contradicts_itself(tmp_path, case):
    change, why = case
    path = record(tmp_path, "a").path
    content = json.loads(path.read_text())
    change(content["record"])
    path.write_text(json.dumps(content))
    assert any("contradicts itself" in fault and why in fault for fault in seal_problems(resealed(path)))
