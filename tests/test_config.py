import importlib
import math
import typing
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_rm.config import (
    Config,
    Finite,
    Flag,
    NonNegativeInt,
    PositiveInt,
    divide_settings,
    load_config,
    one_of,
    override_values,
    parse_settings,
    settings_of,
)
from gym_rm.documents import parse_yaml
from gym_rm.errors import ConfigError
from gym_rm.policy.grpo_settings import GRPOSettings
from gym_rm.training.reward_model_settings import RewardModelTraining


class Policy(Config):
    model: str
    dtype: Literal["auto", "float32"] = "auto"


class Optimizer(Config):
    learning_rate: float = pydantic.Field(1e-3, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)


class ScorerEntry(Config):
    name: str
    weight: float = 1.0


class Run(Config):
    policy: Policy = Policy(model="small")
    optimizer: Optimizer = Optimizer(learning_rate=1e-4)
    scorers: tuple[ScorerEntry, ...] = (ScorerEntry(name="a"), ScorerEntry(name="b"))
    options: dict[str, int] = pydantic.Field(default={"x": 1})
    judge: Policy | None = None
    seed: int = 0
    name: str | None = None
    verbose: bool = False


class Limits(Config):
    length: PositiveInt | None = None
    cache: NonNegativeInt = 0
    tree: Flag = True
    penalty: Finite = 0.0


def file_with(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def problems(*overrides: str, schema: type[pydantic.BaseModel] = Run) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(schema, overrides=overrides)
    return str(caught.value)


def test_overrides_replace_the_file_which_replaces_defaults(tmp_path):
    file = file_with(tmp_path, "seed: 1\nname: file\noptimizer:\n  betas: [0.5, 0.6]\n")
    config = load_config(Run, file, ["name=override"])
    assert (config.seed, config.name) == (1, "override")
    assert config.optimizer == Optimizer(learning_rate=1e-4, betas=(0.5, 0.6))  # keeps Run's default learning rate


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("optimizer.learning_rate=3e-4", lambda c: c.optimizer.learning_rate, 3e-4),
        ("optimizer.learning_rate=1", lambda c: c.optimizer.learning_rate, 1.0),
        ("optimizer.betas.1=.5", lambda c: c.optimizer.betas, (0.9, 0.5)),
        ("scorers.1.weight=2", lambda c: [s.weight for s in c.scorers], [1.0, 2.0]),
        ("scorers=[{name: c}]", lambda c: c.scorers, (ScorerEntry(name="c"),)),
        ("options.y=2", lambda c: c.options, {"x": 1, "y": 2}),
        ("judge.model=big", lambda c: c.judge, Policy(model="big")),
        ("name=123", lambda c: c.name, "123"),
        ("name=no", lambda c: c.name, "no"),
        ("name=2026-01-01", lambda c: c.name, "2026-01-01"),
        ("name=12:30", lambda c: c.name, "12:30"),
        ("name=org/model:main", lambda c: c.name, "org/model:main"),
        ("name='null'", lambda c: c.name, "null"),
        ("name=null", lambda c: c.name, None),
        ("name=", lambda c: c.name, None),
        ("name=a=b", lambda c: c.name, "a=b"),
        ("verbose=true", lambda c: c.verbose, True),
        ("seed=1_000", lambda c: c.seed, 1000),
    ],
)
def test_an_override(override, read, value):
    assert read(load_config(Run, overrides=[override])) == value


@given(st.floats(allow_nan=False))
def test_every_float_is_read_exactly(value):
    class Number(Config):
        value: float = 0.0

    assert load_config(Number, overrides=[f"value={str(value).replace('inf', '.inf')}"]).value == value


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sed=1", "sed: unknown setting. Did you mean 'seed'?"),
        ("policy.modle=x", "policy.modle: unknown setting. Did you mean 'model'?"),
        ("learning_rate=1", "learning_rate: unknown setting. Did you mean 'optimizer.learning_rate'?"),
        ("scorers.0.weigth=1", "scorers.0.weigth: unknown setting. Did you mean 'weight'?"),
        ("optimizer.zzz=1", "optimizer.zzz: unknown setting. Known settings: learning_rate, betas."),
        ("seed=many", "seed: input should be a valid integer, unable to parse string as an integer, got str 'many'."),
        ("optimizer.learning_rate=-1", "optimizer.learning_rate: input should be greater than 0, got -1."),
        ("policy.dtype=flaot32", "policy.dtype must be 'auto' or 'float32', got 'flaot32'. Did you mean 'float32'?"),
        ("policy.dtype=int8", "policy.dtype must be 'auto' or 'float32', got 'int8'."),
        ("name=true", "name: input should be a valid string, got bool True."),
        ("seed", "'seed': expected the form name=value or group.name=value."),
        ("a..b=1", "'a..b=1': expected the form"),
        ("name=[1", "override 'name=[1': the value is not valid YAML"),
        ("scorers.2.weight=1", "override 'scorers.2.weight=1': '2' is not an index into a list of 2 entries."),
        ("scorers.a.weight=1", "override 'scorers.a.weight=1': 'a' is not an index"),
        ("seed.x=1", "override 'seed.x=1': 'seed' is 0, which has no 'x'."),
        ("judge.dtype=auto", "judge.model: missing; this setting has no default."),
    ],
)
def test_an_invalid_override_is_refused(override, message):
    assert message in problems(override)


class Several(Config):
    """Settings that can be of several types."""

    size: str | float = 1.0
    price: float | dict[str, float] | None = None
    inner: int | Policy = 1
    places: Literal["auto", "apart"] | tuple[tuple[str, ...], ...] = "auto"
    chosen: one_of(lambda value: "group" if isinstance(value, dict) else "value", value=str, group=Limits) = "x"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("size=[1]", "size must be a text or a number, got list [1]."),
        ("price=free", "price must be a number or a mapping, got str 'free'."),
        ("price={a: x}", "price.a: input should be a valid number, unable to parse string as a number, got str 'x'."),
        ("inner={model: x, dtpye: auto}", "inner.dtpye: unknown setting. Did you mean 'dtype'?"),
        ("places=aprt", "places must be 'auto' or 'apart', or a list, got str 'aprt'. Did you mean 'apart'?"),
        ("places=[x]", "places.0 must be a list, got str 'x'."),
        ("chosen={zzz: 1}", "chosen.zzz: unknown setting."),
    ],
)
def test_a_setting_of_several_types_has_one_problem(override, message):
    text = problems(override, schema=Several)
    assert message in text
    assert text.startswith("1 problem in the settings:\n")


def test_a_text_in_place_of_a_group_with_a_model_says_how_to_write_it():
    assert "policy must be a mapping of settings, got str 'x'. Write policy.model=x." in problems("policy=x")


def test_a_setting_below_false_replaces_it():
    class Run(Config):
        judge: Policy | bool = False

    assert load_config(Run, overrides=["judge.model=x"]).judge.model == "x"


def test_all_problems_are_in_one_error():
    message = problems("sed=1", "seed=x", "nonsense", "policy.dtype=int8")
    assert message.startswith("4 problems in the settings:\n")
    assert message.count("\n  ") == 4


def test_the_message_of_a_validator_is_kept():
    class Ruled(Config):
        low: int = 0
        high: int = 1

        @pydantic.model_validator(mode="after")
        def ordered(self):
            if self.low > self.high:
                raise ValueError(f"low={self.low} must not be above high={self.high}.")
            return self

    assert "\n  low=2 must not be above high=1." in problems("low=2", schema=Ruled)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: [1", "cannot read the settings in "),
        ("- seed", "run.yaml' must be a mapping with the settings, got list: ['seed']."),
        (
            "seed: 1\nseed: 2\n",
            "run.yaml': found duplicate key",
        ),
        ("sed: 1", "run.yaml: 1 problem in the settings:\n  sed: unknown setting. Did you mean 'seed'?"),
        ("name: !!python/object:os.system {}", "cannot read the settings in "),
        ("? [a]\n: 1\n", "keys should be strings, got tuple"),
    ],
)
def test_an_invalid_file_is_refused(tmp_path, text, message):
    with pytest.raises(ConfigError) as caught:
        load_config(Run, file_with(tmp_path, text))
    assert message in str(caught.value)


# --- settings from keywords


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"length": 0}, "length must be an integer of at least 1, got 0."),
        ({"length": 2.0}, "length must be an integer of at least 1, got 2.0."),
        ({"length": True}, "length must be an integer of at least 1, got bool True."),
        ({"length": "12"}, "length must be an integer of at least 1, got str '12'."),
        ({"cache": -1}, "cache must be an integer of at least 0, got -1."),
        ({"tree": "yes"}, "tree must be true or false, got str 'yes'."),
        ({"tree": 1}, "tree must be true or false, got 1."),
        ({"penalty": float("nan")}, "penalty must be a finite number, got nan."),
        ({"penalty": "1"}, "penalty must be a finite number, got str '1'."),
        ({"lenght": 1}, "lenght: unknown setting. Did you mean 'length'?"),
    ],
)
def test_an_invalid_keyword_is_refused(values, message):
    with pytest.raises(ConfigError) as caught:
        parse_settings(Limits, values)
    assert str(caught.value) == message


def test_numpy_numbers_are_accepted():
    found = parse_settings(
        Limits, {"length": np.int64(3), "cache": np.int32(0), "tree": np.bool_(False), "penalty": np.float32(0.5)}
    )
    assert found == Limits(length=3, cache=0, tree=False, penalty=0.5)
    assert [type(value) for value in dict(found).values()] == [int, int, bool, float]


def test_keywords_are_divided_among_schemas_and_others_are_refused():
    limits, policy = divide_settings({"model": "small", "cache": 3}, Limits, Policy, owner="a test")
    assert (limits, policy) == (Limits(cache=3), Policy(model="small"))
    with pytest.raises(ConfigError) as caught:
        divide_settings({"model": "small", "chache": 3}, Limits, Policy, owner="a test")
    assert str(caught.value) == (
        "unknown option 'chache' for a test. Did you mean 'cache'? "
        "Known options: cache, dtype, length, model, penalty, tree."
    )


def test_settings_are_described_for_a_help_page():
    class Described(Config):
        """Schema with a docstring."""

        name: str
        """Its
        name."""
        reduction: Literal["min", "mean"] | None = "min"
        sizes: tuple[int, ...] | dict[str, Any] = (1, 2)
        anything: Any = None

    assert [(each.name, each.type, each.default, each.text) for each in settings_of(Described)] == [
        ("name", "str", "required", "Its name."),
        ("reduction", "'min' or 'mean' or null", '"min"', ""),
        ("sizes", "list of int or mapping of str, any value", "[1, 2]", ""),
        ("anything", "any value", "null", ""),
    ]


def test_overrides_alone_become_nested_values():
    overrides = ["policy.model=x", "policy.dtype=auto", "seed=1", "betas=[0.5, 0.6]"]
    assert override_values(overrides) == {
        "policy": {"model": "x", "dtype": "auto"},
        "seed": 1,
        "betas": [0.5, 0.6],
    }
    with pytest.raises(ConfigError, match="'seed': expected the form"):
        override_values(["seed"])


# --- the configs of this repository


CONFIGS = sorted((Path(__file__).parents[1] / "configs").rglob("*.yaml"))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_every_config_loads_and_contains_only_changed_settings(file):
    from agents.grpo import GRPOSettings
    from gym_rm.planning.request_settings import PlanSettings
    from gym_rm.training.reward_model_settings import RewardModelTraining

    schema = {"grpo": GRPOSettings, "plan": PlanSettings, "rm": RewardModelTraining}[file.parent.name]
    defaults = schema().model_dump(mode="json")
    differing = load_config(schema, file).model_dump(mode="json")
    for path, value in leaves(parse_yaml(file.read_text())):
        assert read_path(differing, path) == value
        assert read_path(defaults, path) != value, f"{'.'.join(path)} is already the default"


def leaves(values: dict, path: tuple[str, ...] = ()) -> list:
    nested = [leaves(v, (*path, k)) if isinstance(v, dict) else [((*path, k), v)] for k, v in values.items()]
    return [leaf for group in nested for leaf in group]


def read_path(values: dict, path: tuple[str, ...]) -> object:
    """Return a value; None if a group above it has none."""
    for part in path:
        values = values.get(part) if isinstance(values, dict) else None
    return values


# --- numbers ---------------------------------------------------------------------------------------------------------


def types_in(annotation) -> set[type]:
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Annotated:
        arguments = arguments[:1]
    return set().union(*map(types_in, arguments)) if arguments else {annotation}


def number_fields():
    """Yield every setting of the package that is a number, or a list of numbers, with its schema."""
    pytest.importorskip("httpx")
    for module in ("policy.grpo_settings", "planning.simulation", "planning.planner", "envs.settings", "engine.kinds"):
        importlib.import_module(f"gym_rm.{module}")
    for module in ("engine.reward_model_scorer", "scorers.weighted", "scorers.judge.scorer", "scorers.remote.scorer"):
        importlib.import_module(f"gym_rm.{module}")
    schemas = [Config]
    while schemas:
        schema = schemas.pop()
        schemas += schema.__subclasses__()
        for name, field in schema.model_fields.items():
            types = types_in(field.annotation) - {type(None), Ellipsis}
            if types and types <= {int, float, bool} and schema.__module__.startswith("gym_rm."):
                yield schema, name, typing.get_origin(field.annotation) is tuple


@pytest.mark.parametrize("bad", ["4", math.inf, math.nan, 10**400, b"1", [], "true"], ids=repr)
def test_no_number_of_any_setting_is_a_text_or_infinite(bad):
    found = list(number_fields())
    assert len(found) > 100
    for schema, name, is_list in found:
        with pytest.raises(ConfigError, match=rf"\b{name}"):
            parse_settings(schema, {name: [bad, bad] if is_list else bad})
        if bool not in types_in(schema.model_fields[name].annotation):
            with pytest.raises(ConfigError, match=rf"\b{name}"):
                parse_settings(schema, {name: [True, True] if is_list else True})


@pytest.mark.parametrize("override", ["optimizer.betas=[0.9, 1.5]", "optimizer.betas=[-0.1, 0.9]", "threads=100000"])
def test_numbers_that_torch_would_not_survive_are_refused(override):
    for schema in (GRPOSettings, RewardModelTraining):
        with pytest.raises(ConfigError, match=override.partition("=")[0]):
            load_config(schema, overrides=[override])
