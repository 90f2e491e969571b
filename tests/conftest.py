"""What tests run under: one thread, poisoned memory, derandomised properties, one browser.

torch is imported where it is used: the process that only hands out tests does without.
"""

import gc

import jaxtyping
import pytest
from hypothesis import HealthCheck, settings

from tests.brief import replace_measurements

settings.register_profile(
    "default",
    derandomize=True,
    deadline=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "random",
    deadline=None,
    max_examples=50,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "thorough",
    deadline=None,
    max_examples=2000,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("default")


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Tests run in parallel processes; more threads in each would only get in their way."""
    import torch

    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # for the processes that they start
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)  # or each would compile torch
        yield


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """Keep measured step times out of the user's cache folder, and measure next to nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        replace_measurements(patch.setattr)
        yield


@pytest.fixture(autouse=True)
def _poisoned_memory(request):
    """Fill what torch.empty returns with NaN, so that a read before a write shows."""
    import torch

    # Deterministic mode is what fills: torch.utils.deterministic.fill_uninitialized_memory. On
    # CUDA it refuses sums that have no deterministic kernel.
    torch.use_deterministic_algorithms(request.node.get_closest_marker("gpu") is None)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def unchecked(monkeypatch):
    """Let wrong shapes and names past the tests' type checker, to the functions' own checks."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture
def no_report(monkeypatch):
    """Let training commands end without a report, which costs more than a few steps do."""
    from analysis.pages.report_files import ReportFiles

    monkeypatch.setattr(
        "analysis.pages.report.write_quick", lambda run, *calls: ReportFiles(run.path)
    )


@pytest.fixture(scope="module")
def forked_workers():
    """Fork the processes that train a sweep's cells, which would import torch first."""
    from tests.forked_worker import start

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lab.sweeps.pool.Worker._start", start)
        yield


def pytest_configure():
    """Collect no garbage while tests are collected: a fifth of that time, and there is none."""
    gc.disable()


def pytest_collection_finish():
    """Leave what collection has made out of all later collections of garbage."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items):
    """Leave out what needs a GPU where there is none: deselected, not skipped."""
    import torch

    if not torch.cuda.is_available():
        items[:] = [item for item in items if item.get_closest_marker("gpu") is None]


QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="session")
def browser():
    """The Chromium that draws images, too; without any, the tests fail.

    A process can have one only: playwright refuses to start a second time.
    """
    from playwright.sync_api import Error, sync_playwright

    from analysis.pages.export import find_browser

    chromium = find_browser()
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=chromium, args=QUIET)
        except Error as error:
            pytest.fail(f"the report's tests need Chromium: run `make browser`. {error}")
        yield browser
        browser.close()
