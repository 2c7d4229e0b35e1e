"""A judge that decides by the probabilities of its verdicts, here and behind a server."""

import chain_models
import numpy as np
import pytest

pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

from generation.model_server import ModelApp
from reward_servers import serve

from gym_rm import ConfigError, load_scorer
from gym_rm.scorer import try_score
from tests.scorers.judge.test_scorer import Judge, ask, by_length

PAIRS = {"mode": "pairwise", "comparisons": "all_pairs"}


def chain(folder, line, *verdicts):
    """Save a judge that goes on with one of these verdicts after its line, all equally likely."""
    ends = {each: [chain_models.END] for each in verdicts}
    return chain_models.save_chain(folder, {"\n": [line], line: verdicts, **ends})


def scored(model, **options):
    return try_score(load_scorer(str(model), kind="judge", verdict="probabilities", **options), ask("4", "five"))


def test_a_comparison_is_the_probability_of_a_in_both_orders(tmp_path):
    scores = scored(chain(tmp_path, "Verdict:", " A", " B", " tie"), **PAIRS)
    np.testing.assert_allclose(scores.rewards, 0.5, atol=1e-5)
    np.testing.assert_allclose(scores.infos["verdict_mass"], 2 / 3, atol=1e-2)
    assert scores.infos["judge_unread"].sum() == 0


def test_a_score_is_the_mean_level(tmp_path):
    np.testing.assert_allclose(scored(chain(tmp_path, "Score:", " 2", " 8", " no")).rewards, 5, atol=1e-2)


def test_verdicts_that_the_model_hardly_considers_are_no_number(tmp_path):
    scores = scored(chain(tmp_path, "Score:", " no"))
    assert np.isnan(scores.rewards).all()
    assert "below min_mass=0.1" in scores.errors[0]


@pytest.mark.parametrize("options", [{}, PAIRS, {"rubric": [{"criterion": "It is short.", "weight": 1}]}])
def test_a_server_tells_the_same_as_the_model_in_this_process(tmp_path, options):
    folder = chain_models.save_chain(
        tmp_path,
        {"\n": ["Score:"], "Score:": [" 2", " 7"], "Verdict:": [" B", " A", " no", "Yes"], "Yes": [chain_models.END]},
    )
    with serve(ModelApp(folder)) as url:
        there, here = scored(url, **options), scored(folder, **options)
    np.testing.assert_allclose(there.rewards, here.rewards, atol=1e-3)
    np.testing.assert_allclose(there.infos["verdict_mass"], here.infos["verdict_mass"], atol=1e-3)


@pytest.mark.parametrize("options", [{"samples": 2}, {"marked": False}, {"scale": (0, 0.5)}, {"mode": "listwise"}])
def test_options_without_effect_are_refused(options):
    with pytest.raises(ConfigError):
        load_scorer(Judge(by_length), kind="judge", verdict="probabilities", **options)


def test_a_model_that_only_replies_is_refused():
    with pytest.raises(ConfigError, match="has no method choose"):
        load_scorer({"kind": "judge", "model": Judge(by_length), "verdict": "probabilities"})
