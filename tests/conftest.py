"""Fixtures that several test files share: real conversations, and tiny reward models saved once per session."""

import gzip
import json
import shutil
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from tests import real_data

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]

settings.register_profile("gym_rm", deadline=None, max_examples=60)
settings.load_profile("gym_rm")


def pytest_configure(config):
    """Hear SIGINT, here and in child processes: a shell starts what runs in its background with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if folder := config.getoption("--data"):
        if not folder.is_dir():
            raise pytest.UsageError(f"--data {folder} is not a folder; pass that of the real conversations.")
        real_data.FOLDER = folder.resolve()


def pytest_addoption(parser):
    parser.addoption("--data", type=Path, help=f"folder of the real conversations; default: {real_data.FOLDER}")
    parser.addoption("--tree", action="append", default=[], metavar="NAME=PATH", help="sources of a trainer")
    parser.addoption("--vllm", type=Path, help="folder of an environment with vLLM, see scripts/vllm_environment.sh")
    parser.addoption(
        "--passed-tests",
        type=Path,
        help="file of tests that passed before: they are left out, and those that pass join",
    )


def pytest_collection_modifyitems(config, items):
    file = config.getoption("--passed-tests")
    if file is None or not file.exists():
        return
    passed = set(file.read_text().splitlines())
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
    items[:] = [item for item in items if item.nodeid not in passed]


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not sys.modules["torch"].cuda.is_available():
        pytest.skip("no GPU")
    if item.get_closest_marker("data"):
        require_data()


def pytest_terminal_summary(terminalreporter, config):
    file = config.getoption("--passed-tests")
    if file is not None and not hasattr(config, "workerinput"):  # not in the processes of xdist
        with file.open("a") as lines:
            lines.writelines(f"{report.nodeid}\n" for report in terminalreporter.stats.get("passed", ()))


def require_data():
    if not real_data.FOLDER.is_dir():
        pytest.skip(f"no folder {real_data.FOLDER}; --data names another one")


@pytest.fixture(scope="session")
def tree(pytestconfig):
    """Return a function from the name of a trainer to the folder of its sources; a test skips if it is not given."""
    folders = dict(each.split("=", 1) for each in pytestconfig.getoption("--tree"))
    return lambda name: Path(folders[name]) if name in folders else pytest.skip(f"needs --tree {name}=PATH")


def rows(name):
    require_data()
    with gzip.open(real_data.FOLDER / f"{name}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def solutions():
    """Return a right solution of every embedded task of `Code-v0`."""
    lines = (Path(__file__).parent / "scorers" / "code" / "solutions.jsonl").read_text().splitlines()
    return {row["id"]: row["code"] for row in map(json.loads, lines)}


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Use one thread, which is faster than several for such small models."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(scope="session")
def gsm8k_groups():
    """658 groups: one question and the graded replies of four models."""
    return [
        [[user(row["question"]), assistant(solution["text"])] for solution in row["solutions"]]
        for row in rows("gsm8k_graded")
    ]


@pytest.fixture(scope="session")
def hh_pairs():
    """1,150 pairs: a dialogue of up to 35 messages with the better and the worse last reply."""
    return [[row["context"] + one["completion"] for one in row["completions"]] for row in rows("hh_harmless")]


@pytest.fixture(scope="session")
def real_conversations(gsm8k_groups, hh_pairs):
    """8 conversations of 60 to 400 tokens that every chat template accepts: one group and two pairs of dialogues."""
    short = [pair for pair in hh_pairs if len(pair[0]) >= 4 and sum(len(m["content"]) for m in pair[0]) < 500]
    return [conversation for group in [gsm8k_groups[0], *short[:2]] for conversation in group]


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory):
    """Function that saves a tiny reward model of an architecture, with overrides, and returns its folder."""
    import tiny_models  # imports torch

    folders = {}

    def save(architecture="qwen3", **overrides):
        key = (architecture, repr(sorted(overrides.items())))
        if key not in folders:
            folder = tmp_path_factory.mktemp(architecture)
            folders[key] = str(tiny_models.save_reward_model(folder, architecture, **overrides))
        return folders[key]

    return save


@pytest.fixture(scope="session")
def scorer_of(saved_model):
    """Function that returns a scorer of `saved_model(...)`, loaded once with default options."""
    import gym_rm

    scorers = {}

    def load(architecture="qwen3"):
        if architecture not in scorers:
            scorers[architecture] = gym_rm.load_scorer(saved_model(architecture))
        return scorers[architecture]

    return load


@pytest.fixture(scope="module")
def chat_server():
    """A served chat model that answers by a function; `chat_server.__init__(answer)` starts it again."""
    from generation.chat_servers import ChatApp
    from reward_servers import serve

    app = ChatApp()
    with serve(app) as url:
        app.url = url
        yield app


@pytest.fixture(scope="module")
def browser():
    """A real browser. Playwright has a running event loop in the thread, so that it must end with the module."""
    sync_api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()
