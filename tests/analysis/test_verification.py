"""A record is held against its own seal, a digest from elsewhere, and the journal it is of."""

from __future__ import annotations

import json

import pytest
from each import of_each
from made_records import lines, record, write_journal

from pytest_gpucluster.analysis.certificate import Document, certificate_content, digest, read_certificate, sealed
from pytest_gpucluster.analysis.certificate_audit import faults, faults_beside, journal_digest
from pytest_gpucluster.errors import JournalError


@pytest.fixture
def made(tmp_path):
    """A record of a journal on disk: (its path, the journal's path)."""
    journal = write_journal(tmp_path / "run", lines())
    sha256, told = journal_digest(journal)
    text, _ = sealed(
        certificate_content(told, sha256=sha256), at="2026-01-02T03:04:05Z", by="", note="", version="0.1.0"
    )
    (tmp_path / "a.json").write_text(text)
    return tmp_path / "a.json", journal


def resealed(path) -> Document:
    """Seal what now stands in a file anew, as a forger would."""
    told = json.loads(path.read_text())
    told["sha256"] = digest(told["record"])
    path.write_text(json.dumps(told))
    return read_certificate(path)


def test_a_record_beside_its_own_journal_has_no_fault(made):
    path, journal = made
    sha256, told = journal_digest(journal)
    document = read_certificate(path)
    assert faults(document, known_digest=document.digest.upper()) == []
    assert faults_beside(document, told, sha256) == []


def test_a_changed_record_is_told_with_both_digests(made):
    path, _ = made
    text = path.read_text()
    path.write_text(text.replace("gpu-01", "gpu-99"))
    document = read_certificate(path)
    [fault] = faults(document)
    assert document.sealed in fault
    assert document.digest in fault


def test_a_forged_seal_is_noticed_by_a_digest_from_elsewhere_and_by_the_journal(made):
    path, journal = made
    known = read_certificate(path).digest
    path.write_text(path.read_text().replace("gpu-01", "gpu-99"))
    document = resealed(path)
    assert faults(document) == []
    [fault] = faults(document, known_digest=known)
    assert f"not {known}" in fault
    sha256, told = journal_digest(journal)
    [fault] = faults_beside(document, told, sha256)
    assert "nodes[0].host, run.host" in fault


def test_a_record_of_another_journal_is_told(made, tmp_path):
    path, _ = made
    found = lines()
    found[0]["run_id"] = "another"
    sha256, told = journal_digest(write_journal(tmp_path / "other", found))
    [fault] = faults_beside(read_certificate(path), told, sha256)
    assert "another journal" in fault


def test_a_journal_that_is_being_written_or_is_none_is_refused(made, monkeypatch):
    _, journal = made
    from pytest_gpucluster.analysis import certificate_audit
    from pytest_gpucluster.journal import journal as journal_module

    def growing(path):
        path.write_bytes(path.read_bytes() + b'{"type":"property","name":"a","value":"b"}\n')
        return journal_module.Journal

    monkeypatch.setattr(certificate_audit, "read", growing)
    with pytest.raises(JournalError, match="being written"):
        journal_digest(journal)
    for path in (journal.parent / "none", journal.parent):
        with pytest.raises(JournalError, match=str(path)):
            journal_digest(path)


def _gpu_twice(told: dict) -> None:
    first, second, *_ = told["nodes"][0]["gpus"]
    first["uuid"] = second["uuid"].upper()


@of_each(
    "case",
    [
        (lambda told: told["verdict"].update(word="REJECTED"), ""),
        (lambda told: told["tests"][0].update(outcome="failed"), "1 of its tests"),
        (lambda told: told["tests"][0]["measurements"][0].update(status="failed"), "1 of its values"),
        (lambda told: told.update(tests=[]), "none of its values"),
        (lambda told: told["nodes"][0]["gpus"].pop(), "2 nodes with 15 GPUs"),
        (_gpu_twice, "UUID"),
        (lambda told: told["nodes"][0].update(gpus="eight"), "2 nodes with 8 GPUs"),
    ],
)
def test_a_record_that_was_changed_and_sealed_anew_contradicts_itself(tmp_path, case):
    change, why = case
    path = record(tmp_path, "a").path
    told = json.loads(path.read_text())
    change(told["record"])
    path.write_text(json.dumps(told))
    assert any("contradicts itself" in fault and why in fault for fault in faults(resealed(path)))
