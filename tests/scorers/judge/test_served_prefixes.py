"""What a server's prefix cache saves of a judge's questions about one prompt."""

import pytest

pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

from conftest import assistant, user
from generation.model_server import ModelApp
from reward_servers import serve

from gym_rm import load_scorer
from gym_rm.checks import model_source
from gym_rm.scorer import try_score

QUESTION = "Which of these three numbers is the largest one, 12, 30 or 27? " * 12


@pytest.mark.parametrize(
    "options",
    [
        {"style": "genrm", "comparisons": "circular"},
        {"mode": "score"},
    ],
)
def test_the_prompt_of_a_group_is_computed_once(options):
    app = ModelApp(model_source("path", "embedded:judge"))
    replies = [[user(QUESTION), assistant(f"It is {number}.")] for number in range(3)]
    with serve(app) as url:
        judge = load_scorer(url, kind="judge", max_new_tokens=4, max_retries=0, max_connections=1, **options)
        try_score(judge, replies)
    shared = len(app.tokenizer(QUESTION)["input_ids"])
    assert len(app.seen) == len(app.requests) > 2
    assert all(cached > shared for cached in app.cached[1:])
