"""A browser without a window."""

import contextlib

import pytest
from programs import require_program

_PAGE_SECONDS = 60
_OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    # It must not speak to anybody by itself: then whatever leaves is the page's doing.
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"),
    *("--disable-default-apps", "--disable-extensions", "--no-default-browser-check"),
)


@contextlib.contextmanager
def browser(*, scripts=True):
    """Start Chromium without a window, with or without JavaScript; it ends with the block."""
    binary, driver_binary = require_program("chromium"), require_program("chromedriver")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for option in _OPTIONS:
        options.add_argument(option)
    options.add_argument("--window-size=1280,1000")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    if not scripts:
        options.add_experimental_option("prefs", {"profile.managed_default_content_settings.javascript": 2})
    from selenium.webdriver.chrome.service import Service

    chrome = webdriver.Chrome(options=options, service=Service(driver_binary))
    try:
        chrome.set_page_load_timeout(_PAGE_SECONDS)
        yield chrome
    finally:
        chrome.quit()


def open_file(chrome, path):
    """Load a page from disk, with a log that begins here."""
    assert path.is_file(), path
    chrome.get("about:blank")
    for kind in ("browser", "performance"):
        chrome.get_log(kind)
    chrome.get(path.resolve().as_uri())


def console(chrome):
    """Return what the page has written to the console since it was opened: errors, and what its policy forbade."""
    return [str(entry["message"]) for entry in chrome.get_log("browser")]


def requests(chrome):
    """Return the address of every request since the page was opened; what is in the page itself is none."""
    import json

    sent = {}
    for entry in chrome.get_log("performance"):
        event = json.loads(entry["message"])["message"]
        told = event.get("params", {})
        if event.get("method") == "Network.requestWillBeSent":
            sent[str(told["requestId"])] = str(told["request"]["url"])
        elif told.get("blockedReason") == "csp":  # the page's policy has stopped it before it left
            sent.pop(str(told["requestId"]), None)
    return [address for address in sent.values() if not address.startswith(("data:", "chrome"))]
