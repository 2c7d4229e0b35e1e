import datetime

import pytest
import tiny_models

from gym_rm.engine.text.renderer import Renderer
from gym_rm.engine.text.templates import DATE, freeze_date, own_template, parse_date, token_of
from gym_rm.errors import ConfigError
from tests.engine.text.rendering import text_of, user

# --- the template of a tokenizer


def test_one_of_several_templates_must_be_the_default():
    templates = {"rag": tiny_models.CHATML, "tool_use": tiny_models.PLAIN}
    with pytest.raises(ConfigError, match=r"\['rag', 'tool_use'\] and no default"):
        Renderer(tiny_models.tokenizer("chatml", chat_template=templates))
    named = Renderer(tiny_models.tokenizer("chatml", chat_template=templates | {"default": tiny_models.PLAIN}))
    assert text_of(named, [user("q")]) == "user: q\n"


@pytest.mark.parametrize("template", [None, "", {"default": ""}])
def test_an_empty_template_counts_as_none(template):
    assert own_template(tiny_models.tokenizer("plain", chat_template=template)) is None


def test_an_object_without_a_template_has_none():
    assert own_template(object()) is None


# --- the date


DATED = "{% if strftime_now is defined %}{{ 'Today: ' + strftime_now('%d %b %Y') }}{% endif %}" + tiny_models.CHATML
DATED_LATER = (
    "{% set format = '%-d. %B %Y, %A%%' %}{% macro day() %}{{ strftime_now(format) }}{% endmacro %}{{ day() }}"
    "{{ messages[0]['content'] }}"
)


@pytest.mark.parametrize(
    ("template", "written", "next_day"),
    [
        (DATED, "Today: 26 Jul 2024<|im_start|>", "27 Jul 2024"),
        ("{{ strftime_now('%F %e %T %D') }}" + tiny_models.CHATML, "2024-07-26 26 00:00:00 07/26/24", "2024-07-27 27"),
        (DATED_LATER, "26. July 2024, Friday%", "27. July 2024"),
    ],
)
def test_templates_that_write_the_date_get_a_fixed_one(template, written, next_day, warnings):
    tok = tiny_models.tokenizer("chatml", chat_template=template)
    assert text_of(Renderer(tok), [user("q")]).startswith(written)
    assert "writes today's date" in warnings.text
    for later in (DATE + datetime.timedelta(days=1), "2024-07-27"):
        assert next_day in text_of(Renderer(tok, date=later), [user("q")])
    with pytest.raises(ConfigError, match="date must be"):
        Renderer(tok, date="yesterday")


def test_a_fixed_date_does_not_change_the_rest_of_a_template():
    for start in ("", " ", "\n", "\n\n ", "{# note #}\n", "  {% if true %}x{% endif %}"):
        template = start + "{{ messages[0]['content'] }}"
        dated = template + "{% if false %}{{ strftime_now('%Y') }}{% endif %}"
        tok = tiny_models.tokenizer("plain")
        assert text_of(Renderer(tok, chat_template=dated), [user("q")]) == tok.apply_chat_template(
            [user("q")], chat_template=template, tokenize=False
        )


def test_a_date_may_be_iso_text():
    assert parse_date("2024-07-26") == parse_date(DATE) == datetime.date(2024, 7, 26)
    with pytest.raises(ConfigError, match=r"date must be a date or ISO text such as '2024-07-26'; got '26.7.2024'"):
        parse_date("26.7.2024")


@pytest.mark.parametrize("code", [*"aAwdbBmyYHIpMSfjUWcxX%", *(f"-{code}" for code in "dmHIMS")])
def test_every_format_code_gives_what_strftime_gives(code):
    template = freeze_date("{{ strftime_now('" + f"<%{code}>" + "') }}", DATE)
    tok = tiny_models.tokenizer("plain", chat_template=template)
    assert tok.apply_chat_template([user("q")], tokenize=False) == DATE.strftime(f"<%{code}>")


# --- single tokens


def test_the_id_of_a_text_that_is_one_token():
    tok = tiny_models.tokenizer("chatml")
    assert token_of(tok, "<|im_end|>") == tok.convert_tokens_to_ids("<|im_end|>")


@pytest.mark.parametrize(
    ("style", "text"),
    [("chatml", "<|im_end|><|im_end|>"), ("chatml", ""), ("bert", "\u4e16"), ("mistral", "two words")],
)
def test_a_text_that_is_not_one_known_token_is_refused(style, text):
    with pytest.raises(ConfigError, match="is not a single token of"):
        token_of(tiny_models.tokenizer(style), text)
