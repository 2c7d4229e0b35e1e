"""A small run, and a real browser for the pages."""

import pytest

from tests.reports.example_run import write_run


@pytest.fixture
def folder(tmp_path):
    """Folder of a run of 20 steps with measurements at steps 0, 10 and 20."""
    return write_run(tmp_path / "run")


@pytest.fixture
def open_file(browser):
    """Function that opens a page; the test fails if the page asks for anything else or reports an error."""
    requests, complaints, contexts = [], [], []

    def open_page(path, *, scheme="light"):
        contexts.append(browser.new_context(viewport={"width": 1200, "height": 900}, color_scheme=scheme))
        tab = contexts[-1].new_page()
        tab.on("request", lambda request: requests.append(request.url))
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.goto(path.as_uri())
        return tab

    yield open_page
    assert not complaints
    assert all(url.startswith(("file:", "data:")) for url in requests)
    assert len([url for url in requests if url.startswith("file:")]) == len(contexts)
    for context in contexts:
        context.close()
