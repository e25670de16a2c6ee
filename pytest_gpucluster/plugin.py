"""pytest's side: hooks only, each a few lines that call what does the work.

Importing this module must stay cheap: it loads neither torch nor NVML nor YAML. In a project that does not use the
plugin only the four functions below are ever called, and they add nothing but options.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.session import options

if TYPE_CHECKING:
    from pytest_gpucluster.session.reporting import Status
    from pytest_gpucluster.session.session import Session
    from pytest_gpucluster.session.xdist import Controller

_MARKERS = (
    "criterion(name): an acceptance criterion; it must measure something, on every rank, and meet its limits",
    "single_gpu: needs no other rank; also runs under pytest -n <GPUs> --dist each",
    "nccl: exercises collective communication",
    "training: trains a model",
    "needs_ranks(n): does not run with fewer than n ranks",
    "needs_nodes(n): does not run with fewer than n nodes",
    "needs_local_ranks(n): does not run with fewer than n ranks on each node",
    "needs_gpu: does not run in a rehearsal on cpu",
    "needs_peak(name): does not run where the data sheet of the GPU has no such peak, such as fp8_tflops",
    "needs_data(name): does not run without --gpucluster-data name=PATH",
    "needs_scheduler(name): does not run but in a job of this scheduler: slurm or kubernetes",
    "isolate: when it fails, find the faulty nodes, GPUs or links, by probes of smaller groups",
    "deadline(seconds): the longest that one phase of this test may take, instead of --gpucluster-deadline",
    "first(place): runs before every test without this marker, in the order of the numbers, without one after those",
    "soak: runs for a long time, after all tests without this marker",
    "last: runs after all others, soak included",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add options and ini settings."""
    options.register(parser)


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Add what sites can extend."""
    from pytest_gpucluster.session import hookspecs

    pluginmanager.add_hookspecs(hookspecs)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> Generator[None]:
    """Set torch's environment before any conftest can import torch; note a conftest that fails."""
    if not options.asked_for(early_config, args):
        return (yield)
    from pytest_gpucluster.session import start_notes

    with start_notes.begun(early_config):  # first: what is imported next takes seconds, in which a rank may die
        from pytest_gpucluster.journal import verdict
        from pytest_gpucluster.session import activation, rejected_run

        verdict.guard_exit_code()
        activation.prepare_environment()
        rejected_run.replace_earlier(early_config.known_args_namespace)
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Turn the plugin on, where it was asked for, before any other plugin is configured."""
    if not options.active(config):
        return
    from pytest_gpucluster import fixtures
    from pytest_gpucluster.session.activation import configure

    for marker in _MARKERS:
        config.addinivalue_line("markers", marker)
    config.pluginmanager.register(fixtures, "gpucluster-fixtures")
    session, controller = configure(config)
    config.pluginmanager.register(Hooks(session), "gpucluster-hooks")
    if controller is not None:
        config.pluginmanager.register(WorkerHooks(controller), "gpucluster-worker-hooks")


class Hooks:
    """The hooks of an active session."""

    def __init__(self, session: Session | Controller) -> None:
        self._session = session

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Open the run on every rank, or end the session here."""
        self._session.start(session)

    def pytest_internalerror(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Let every rank know which rank pytest has failed on, and why."""
        self._session.internal_error(excinfo.value)

    def pytest_report_header(self) -> list[str]:
        """Say what cluster this is and which settings are in force."""
        return self._session.header()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep collection errors, to be shown by rank 0."""
        self._session.collect_report(report)

    def pytest_deselected(self) -> None:
        """A deselected test makes this run a selection."""
        self._session.deselected()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Let what must come first run before all else, and what takes long after it; the rest stays in its order."""
        from pytest_gpucluster.session.selection import turn_of

        items.sort(key=turn_of)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Refuse tests that cannot be run as they are, before anybody hears of them."""
        self._session.check_items(session)

    def pytest_report_collectionfinish(self) -> list[str]:
        """Say what will be measured with."""
        return self._session.after_collection()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> Generator[None, Any, Any]:
        """Agree on the tests to run, in rank 0's order."""
        try:
            result = yield
        except (pytest.UsageError, pytest.exit.Exception) as error:
            self._session.not_collected(session, error)
            return True
        self._session.collected(session)
        return result

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run nothing when the ranks have not agreed on what to run."""
        return self._session.refuses_to_run() or None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """Start no further test once the run has ended."""
        return self._session.starts(item)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        """Record the start of a test in a worker."""
        self._session.started(nodeid, location)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Set up on every rank, or on none."""
        return (yield from self._session.phase(item, "setup"))

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Generator[None, Any, Any]:
        """Let a fixture that calls ``sys.exit`` cost its own test only.

        pytest 9.2 takes note of an exception that ends a fixture, but not of this one. So it never finishes the
        fixture, and all later tests that use it fail.
        """
        try:
            return (yield)
        except SystemExit as error:
            fixturedef.cached_result = (None, fixturedef.cache_key(request), (error, error.__traceback__))  # type: ignore[arg-type]
            raise

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Run the body on every rank, then judge all measurements at once."""
        return (yield from self._session.phase(item, "call"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Tear down on every rank."""
        return (yield from self._session.phase(item, "teardown"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Keep what the ranks agreed on with the report."""
        from pytest_gpucluster.session.phases import ON_TRIAL

        report = yield
        if ON_TRIAL not in item.stash:
            self._session.made(report, item)
        return report

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> Generator[None, None, None]:
        """Let rank 0's report say what all ranks agreed on, before anybody reads it; then say what was measured."""
        self._session.show(report)
        yield
        self._session.shown(report)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> Generator[None, Status, Status]:
        """Show what broke the run as an error, not as a failure of the hardware."""
        status = yield
        return self._session.status(report, status)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, None, None]:
        """Agree on the verdict and the exit code; say it in the last line."""
        self._session.finish(session)
        yield
        self._session.last_words(session)

    def pytest_unconfigure(self) -> None:
        """Leave the run."""
        self._session.close()


class WorkerHooks:
    """What pytest-xdist reports to the controller of its workers."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Pass to a worker, before it is started, what the controller has started for all of them."""
        node.workerinput.update(self._controller.worker_input())

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Note Ctrl-C. pytest-xdist stops by this, too, such as after ``-x``, with an exception of its own."""
        if excinfo.type is KeyboardInterrupt:
            self._controller.interrupted()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        """Compare what the workers have found."""
        self._controller.worker_collected(node.gateway.id, ids)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object | None) -> None:
        """Note a worker that has crashed, or that could not run the tests."""
        if error:
            self._controller.worker_lost(node.gateway.id, error)
        else:
            self._controller.worker_finished(node.gateway.id, getattr(node, "workeroutput", None) or {})
