"""A browser for the tests of the page."""

import shutil

import pytest
from playwright.sync_api import Error, sync_playwright

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
    """The system's Chromium, else playwright's own; without any, the tests fail."""
    system = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=system, args=QUIET)
        except Error as error:
            pytest.fail(f"the report's tests need Chromium: run `make browser`. {error}")
        yield browser
        browser.close()
