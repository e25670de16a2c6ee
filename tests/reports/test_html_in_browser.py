"""``report.html`` in a browser: it sorts, finds, opens, prints, says nothing on the console, and nothing leaves it."""

import browser
import example_runs
import pytest

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def chrome():
    with browser.browser() as started:
        yield started


@pytest.fixture(scope="session")
def pages(example_folders, example_pages):
    for name, document in example_pages.items():
        (example_folders[name] / "report.html").write_text(document, encoding="utf-8")
    return {name: folder / "report.html" for name, folder in example_folders.items()}


def find(chrome, selector):
    return chrome.find_elements("css selector", selector)


@pytest.mark.smoke
@pytest.mark.parametrize("name", example_runs.NAMES)
def test_a_page_writes_nothing_to_the_console_and_loads_nothing(chrome, pages, name):
    browser.open_file(chrome, pages[name])
    for button in find(chrome, "#open-all"):
        button.click()
    assert browser.console(chrome) == []
    assert browser.requests(chrome) == [pages[name].as_uri()]


def test_what_a_hostile_journal_brings_does_not_run(chrome, pages):
    browser.open_file(chrome, pages["hostile"])
    find(chrome, "#open-all")[0].click()
    # An alert that was open would make each of these an error.
    assert chrome.execute_script("return document.scripts.length") == 1
    assert find(chrome, "img, iframe, object, embed") == []
    assert "javascript:" not in {str(link.get_dom_attribute("href"))[:11] for link in find(chrome, "a")}


def test_the_policy_stops_what_would_get_into_a_page_by_mistake(chrome, pages, tmp_path):
    document = pages["accepted"].read_text(encoding="utf-8")
    planted = (
        "<script>window.ran = 1</script><p onclick='window.ran = 2' id='planted'>x</p>"
        "<img src='http://127.0.0.1:9/x.png' onerror='window.ran = 3'><style>h1 { display: none }</style>"
    )
    (tmp_path / "planted.html").write_text(document.replace("</main>", planted + "</main>"), encoding="utf-8")
    browser.open_file(chrome, tmp_path / "planted.html")
    chrome.execute_script("document.getElementById('planted').click()")
    assert chrome.execute_script("return window.ran") is None
    assert find(chrome, "h1")[0].is_displayed()
    assert "Content Security Policy" in " ".join(browser.console(chrome))
    assert browser.requests(chrome) == [(tmp_path / "planted.html").as_uri()]


def test_a_row_opens_and_closes_by_click_key_and_address(chrome, pages):
    browser.open_file(chrome, pages["cluster"])
    below, toggle = find(chrome, "#c1 tr.more")[0], find(chrome, "#c1 .toggle")[0]
    assert not below.is_displayed()
    toggle.send_keys("\n")
    assert below.is_displayed()
    assert toggle.get_dom_attribute("aria-expanded") == "true"
    find(chrome, "#c1 td.outcome")[0].click()
    assert not below.is_displayed()
    assert toggle.get_dom_attribute("aria-expanded") == "false"
    chrome.execute_script("location.hash = '#c2'")
    assert find(chrome, "#c2 tr.more")[0].is_displayed()


def test_without_scripts_everything_can_be_read(pages):
    with browser.browser(scripts=False) as chrome:
        browser.open_file(chrome, pages["cluster"])
        assert find(chrome, ".js") == []
        assert [each for each in find(chrome, ".controls") if each.is_displayed()] == []
        below = find(chrome, "#c1 tr.more details")[0]
        assert below.is_displayed()
        below.find_element("css selector", "summary").click()
        assert below.find_element("css selector", "h4").is_displayed()
