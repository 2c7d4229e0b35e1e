"""Functions as tools: schemas from hints and docstrings, and arguments of calls."""

import dataclasses
import pickle
from typing import Literal

import pydantic
import pytest

from gym_rm.envs.tools import Tool
from gym_rm.envs.tools.tool import ArgumentsError
from gym_rm.errors import ConfigError


class Place(pydantic.BaseModel):
    city: str
    floors: list[int] = []


@dataclasses.dataclass
class Area:
    width: float
    unit: Literal["m", "km"] = "m"


def search(query: str, place: Place, areas: list[Area] | None = None, *, top: int = 3, conversation, prompt=None):
    """Search for
    something.

    More about it.

    Args:
        query: what to
            search for.
        top (int): how many.

    Returns:
        place: not a parameter.
    """
    return query, place, areas, top


def test_the_schema_comes_from_hints_and_docstring():
    function = Tool(search).schema["function"]
    assert (function["name"], function["description"]) == ("search", "Search for something.")
    parameters = function["parameters"]
    assert parameters["required"] == ["query", "place"]
    assert parameters["properties"]["query"] == {"type": "string", "description": "what to search for."}
    assert parameters["properties"]["top"] == {"type": "integer", "description": "how many."}
    assert "description" not in parameters["properties"]["place"]
    assert set(parameters["properties"]) == {"query", "place", "areas", "top"}
    assert Tool(search).hidden == ["conversation", "prompt"]


def test_arguments_are_converted():
    given = {"query": "x", "place": {"city": "Rome", "floors": ["1"]}, "areas": [{"width": 3}], "top": "5"}
    place, areas = Place(city="Rome", floors=[1]), [Area(3.0)]
    assert Tool(search).arguments(given) == {"query": "x", "place": place, "areas": areas, "top": 5}
    as_texts = {**given, "place": '{"city": "Rome", "floors": [1]}', "areas": "null"}
    assert Tool(search).arguments(as_texts) == {"query": "x", "place": place, "areas": None, "top": 5}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"query": "x"}, "place: Field required"),
        ({"query": "x", "place": {"city": "Rome"}, "tpo": 3}, "tpo: Extra inputs are not permitted"),
        ({"query": "x", "place": {"city": 3}}, "place.city: Input should be a valid string"),
        ({"query": "x", "place": {"city": "Rome"}, "conversation": []}, "conversation: Extra inputs"),
        ("not JSON", "expected a JSON object, got 'not JSON'"),
    ],
)
def test_arguments_that_do_not_fit_are_explained(given, message):
    with pytest.raises(ArgumentsError, match=message):
        Tool(search).arguments(given)


def no_hint(a, b: int):
    pass


def stars(*args: int):
    pass


def words(**kwargs: int):
    pass


def no_schema(a: Tool):
    pass


def unknown_hint(a: "Nothing"):  # noqa: F821
    pass


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (no_hint, "the parameter 'a' of no_hint must have a type hint, for example a: str, and be passed by name"),
        (stars, "the parameter '\\*args: int' of stars must have"),
        (words, "the parameter '\\*\\*kwargs: int' of words must have"),
        (no_schema, "no_schema has a parameter without a JSON schema"),
        (unknown_hint, "the type hints of unknown_hint cannot be read: name 'Nothing' is not defined"),
        (lambda: 1, r"write Tool\(function, name='...'\)"),
        (3, "must be a function with a name"),
    ],
)
def test_functions_that_are_no_tools_are_refused(function, message):
    with pytest.raises(ConfigError, match=message):
        Tool(function)


def test_a_tool_can_have_another_name_and_survives_pickling():
    tool = pickle.loads(pickle.dumps(Tool(search, name="find", description="Find it.")))
    assert (tool.name, tool.schema["function"]["description"]) == ("find", "Find it.")


def test_parameters_may_have_any_name():
    def odd(schema: int, json: int, model_config: int, _private: int, copy: int = 1) -> None:
        pass

    given = {"schema": 1, "json": 2, "model_config": 3, "_private": 4}
    assert Tool(odd).arguments(given) == given
