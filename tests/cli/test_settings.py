"""`gym-rm settings` lists what the classes of settings have."""

from typer.testing import CliRunner

from gym_rm.cli.main import app
from gym_rm.cli.settings import plan_settings, scorer_options, training_settings
from gym_rm.engine.kinds import KINDS
from gym_rm.engine.text.renderer import TextOptions


def test_every_setting_is_listed_with_its_type_and_default():
    for of, sections in (("scorer", scorer_options()), ("train", training_settings()), ("plan", plan_settings())):
        words = " ".join(CliRunner().invoke(app, ["settings", of]).stdout.split())
        for title, settings in sections.items():
            assert f"{title}:" in words
            for each in settings:
                assert f"{each.name} {each.text}".strip() in words
                assert f"[{each.type}; default: {each.default}]" in words


def test_the_options_come_from_the_classes_of_settings():
    groups = scorer_options()
    every = {setting.name for setting in groups["--option NAME=VALUE, for every reward model"]}
    assert set(TextOptions.model_fields) <= every
    kinds = {f"--option NAME=VALUE, for kind={name}" for name, kind in KINDS.items() if kind.Options.model_fields}
    assert kinds <= set(groups)
