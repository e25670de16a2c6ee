import pytest

from pytest_gpucluster.session import reporting


class Sent:
    """Keeps what is put on record, and gives pytest's fixtures their place to write to."""

    def __init__(self):
        self.lines = []

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config):
        reporting.register_suite_properties(config, self.lines.append)


@pytest.fixture
def sent(pytester):
    """Run tests; return the lines that were put on record."""

    def run(text, *arguments, **outcomes):
        pytester.makepyfile(text)
        plugin = Sent()
        # Hypothesis' plugin takes time and plays no part here.
        result = pytester.inline_run("-p", "no:hypothesispytest", *arguments, plugins=[plugin])
        result.assertoutcome(**outcomes)
        return plugin.lines

    return run


def test_a_property_of_the_suite_goes_on_record_as_text(sent):
    lines = sent(
        """
        def test_it(record_testsuite_property):
            record_testsuite_property("site", "north")
            record_testsuite_property("racks", 4)
        """,
        passed=1,
    )
    assert lines == [
        {"type": "property", "name": "site", "value": "north"},
        {"type": "property", "name": "racks", "value": "4"},
    ]


@pytest.mark.parametrize("family", ["xunit1", "xunit2", "legacy"])
def test_a_property_of_a_test_is_no_error_and_no_warning_in_any_family(sent, family):
    lines = sent(
        """
        def test_it(record_property, request):
            record_property("a", 1)
            assert request.node.user_properties == [("a", 1)]
        """,
        "-W",
        "error",
        "-o",
        f"junit_family={family}",
        passed=1,
    )
    assert lines == [], "it travels with the report of its test"


def test_an_attribute_of_a_testcase_is_left_out_with_a_warning(sent):
    lines = sent(
        """
        import pytest

        def test_it(record_xml_attribute):
            with pytest.warns(pytest.PytestWarning, match="'assertions' is left out of the report"):
                record_xml_attribute("assertions", "REQ-1")
        """,
        "-W",
        "ignore:record_xml_attribute is an experimental",
        passed=1,
    )
    assert lines == []
