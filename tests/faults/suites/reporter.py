"""A reporter with the hooks and the option of allure-pytest: a file for each test that ends."""

import uuid
from pathlib import Path

import pytest


def pytest_addoption(parser):
    parser.addoption("--alluredir", dest="allure_report_dir")


def pytest_configure(config):
    config.pluginmanager.register(Listener(config.option.allure_report_dir))


class Listener:
    def __init__(self, folder):
        self.folder = folder
        self.tests = {}

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item, nextitem):
        self.tests[item.nodeid] = ""
        yield
        self.pytest_runtest_logfinish(item.nodeid)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = (yield).get_result()
        if report.when == "setup" or (report.outcome != "passed" and self.tests[item.nodeid] == "passed"):
            self.tests[item.nodeid] = report.outcome

    def pytest_runtest_logfinish(self, nodeid):
        status = self.tests.pop(nodeid, None)
        if status is not None and self.folder:
            Path(self.folder).mkdir(exist_ok=True)
            Path(self.folder, str(uuid.uuid4())).write_text(f"{nodeid.partition('::')[2]} {status or 'skipped'}")
