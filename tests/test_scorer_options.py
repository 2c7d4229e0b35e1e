"""The types of `load_scorer`, for editors and type checkers."""

import inspect
import typing

import pytest

from gym_rm import EnsembleScorer, PairwiseScorer, RewardModelScorer, WeightedScorer
from gym_rm.engine.executors.replica import ParallelOptions
from gym_rm.engine.kinds import KINDS
from gym_rm.engine.loading.checkpoint import LoadOptions
from gym_rm.engine.reward_model_scorer import EngineOptions
from gym_rm.engine.text.renderer import TextOptions
from gym_rm.generation.chat import LocalChatOptions, RemoteChatOptions
from gym_rm.scorer import ModelScorer, ScorerOptions, load_scorer
from gym_rm.scorers.judge import JudgeOptions, JudgeScorer
from gym_rm.scorers.remote_options import RemoteOptions


def keywords(function):
    parameters = inspect.signature(function).parameters.values()
    return {each.name for each in parameters if each.kind is not each.VAR_KEYWORD} - {"self"}


def test_the_typed_options_are_those_of_the_settings():
    general = [LoadOptions, EngineOptions, ParallelOptions, TextOptions, RemoteOptions]
    general += [JudgeOptions, LocalChatOptions, RemoteChatOptions]
    schemas = [*general, *(kind.Options for kind in KINDS.values())]
    known = {name for schema in schemas for name in schema.model_fields} | {"executor", "model"}
    known |= keywords(WeightedScorer) | keywords(EnsembleScorer) | keywords(PairwiseScorer)
    assert set(ScorerOptions.__annotations__) == known - {"path"}


def test_editors_see_the_options():
    first, *_ = typing.get_overloads(load_scorer)
    assert typing.get_type_hints(first)["options"] == typing.Unpack[ScorerOptions]
    assert typing.get_type_hints(first)["return"] is ModelScorer


@pytest.mark.parametrize("scorer", [RewardModelScorer, PairwiseScorer, JudgeScorer, WeightedScorer, EnsembleScorer])
@pytest.mark.parametrize("method", ["score", "sleep", "wake", "clear_cache", "close"])
def test_scorers_with_a_model_have_the_methods_of_the_type(scorer, method):
    expected = list(inspect.signature(getattr(ModelScorer, method)).parameters)
    assert list(inspect.signature(getattr(scorer, method)).parameters)[: len(expected)] == expected
