import mutants
from each import of_each


@of_each("name", list(mutants.PLANTED))
def test_a_planted_bug_has_one_place_and_tests_that_must_see_it(name):
    bug = mutants.PLANTED[name]
    assert (mutants.ROOT / bug.file).read_text(encoding="utf-8").count(bug.old) == 1
    assert all((mutants.ROOT / test).exists() for test in bug.tests)


@of_each("name", list(mutants.SUBJECTS))
def test_a_subject_has_a_module_and_tests(name):
    subject = mutants.SUBJECTS[name]
    assert all((mutants.ROOT / path).exists() for path in (subject.module, *subject.tests))
