"""Text that a chat template does not write is an error or counted; text that it changes is neither."""

import pytest
import tiny_models

from gym_rm.engine.text.renderer import Renderer
from gym_rm.errors import ConversationError
from tests.engine.text.rendering import assistant, each_style, renderer_of, system, text_of, user


def chatml_of(content, condition="true"):
    """Return a ChatML template that writes this Jinja expression for the messages that meet a condition."""
    return (
        f"{{% for m in messages %}}{{% if {condition} %}}{{{{ '<|im_start|>' + m['role'] + '\n' + {content} + "
        "'<|im_end|>\n' }}{% endif %}{% endfor %}"
    )


ANSWER_ONLY = chatml_of("m['content'].split('</think>')[-1]")
# Reasoning of the last reply is kept, with other white space, and the reasoning of earlier replies is dropped.
THINKING = chatml_of(
    "('<think>\n' + m['content'].split('</think>')[0].replace('<think>', '').strip() + '\n</think>\n\n' + "
    "m['content'].split('</think>')[-1].strip() if loop.last and '</think>' in m['content'] "
    "else '<think>\n\n</think>\n\n' * loop.last + m['content'].split('</think>')[-1].strip())"
)
TRANSFORMS = {
    "trim": "m['content'] | trim",
    "upper": "m['content'] | upper",
    "escape": "m['content'] | e | string",
    "JSON": "m['content'] | tojson",
    "one line": "m['content'].split() | join(' ')",
    "indent": "m['content'] | indent(4)",
    "quote": "m['content'] | replace('\"', '&quot;')",
}
TEXTS = ["ok", "a\nb  'c' & <d> \"e\" é 世 🙂 100 % /f", "user", "1", "\n 2 < 3 \n", "assistant: <think>", "\U000f0000"]


def renderer(template, **options):
    return Renderer(tiny_models.tokenizer("chatml"), chat_template=template, **options)


def dropped_of(template, conversation, **options):
    """Return the number of dropped characters, or the error."""
    (one,) = renderer(template, **options).encode([conversation])
    return str(one) if isinstance(one, ConversationError) else one.dropped_characters


# --- text that is written in another form


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("text", TEXTS)
def test_changed_text_is_not_dropped(name, text):
    template = chatml_of(TRANSFORMS[name])
    conversation = [user("What?"), assistant("so " + text), user(text), assistant(text)]
    assert dropped_of(template, conversation) == 0


@each_style
def test_nothing_is_dropped_from_real_dialogues(style, hh_pairs, gsm8k_groups):
    conversations = [conversation for pair in [*hh_pairs[::20], *gsm8k_groups[::20]] for conversation in pair]
    assert {one.dropped_characters for one in renderer_of(style).encode(conversations)} == {0}


def test_a_question_after_the_conversation_does_not_count_as_its_last_message():
    """The kind of reward model adds a user message, so that this template drops the reasoning of the reply."""
    from gym_rm.engine.text.input_format import InputFormat

    asked = Renderer(tiny_models.tokenizer("qwen"), input_format=InputFormat(question="Good?"))
    (error,) = asked.encode([[user("q"), assistant("<think>secret</think>four")]])
    assert "of message 1, the last one (missing: '<think>secret'" in str(error)


# --- text that is not written


def test_a_reply_without_its_reasoning_is_an_error():
    reply = "<think>I will say something else.</think>four"
    assert dropped_of(ANSWER_ONLY, [user("q"), assistant(reply)]) == (
        "the chat template does not write 29 characters of message 1, the last one (missing: '<think>I will say "
        "something else.'...), so the model would not see this text; pass dropped_text='warn' to score the "
        "conversation without it, or another chat_template=."
    )


@pytest.mark.parametrize("reply", ["a</think>b", "user</think>b<|im_end|>", "🙂</think>b", "\U000f0000</think>b"])
def test_a_hidden_part_of_a_reply_is_an_error_whatever_it_is(reply):
    error = dropped_of(ANSWER_ONLY, [user("q"), assistant("word " + reply)])
    assert "of message 1, the last one" in str(error)


def test_the_end_of_a_reply_that_the_template_cuts_is_an_error():
    assert "does not write 4 characters of message 1" in dropped_of(
        chatml_of("m['content'][:10]"), [user("q"), assistant("0123456789 end.")]
    )


def test_dropped_text_is_counted_on_request(warnings):
    conversation = [user("q"), assistant("<think>six six</think>four")]
    assert dropped_of(ANSWER_ONLY, conversation, dropped_text="warn") == len("<think>sixsix")
    assert "does not write all text of the messages" in warnings.text
    text = text_of(renderer(ANSWER_ONLY, dropped_text="warn"), conversation)
    assert text.endswith("assistant\nfour<|im_end|>\n")


def test_reasoning_of_earlier_replies_is_counted_and_not_an_error(warnings):
    conversation = [user("q"), assistant("<think>secret</think>four"), user("sure?"), assistant("yes")]
    assert dropped_of(THINKING, conversation) == 6
    assert "Scores.infos['dropped_characters']" in warnings.text
    assert dropped_of(THINKING, [user("q"), assistant("<think>secret</think>"), user("sure?"), assistant("yes")]) == 6


@pytest.mark.parametrize("text", ["Be brief and kind to everyone.", "system", "user", "a", "<|im_end|>"])
def test_a_message_with_a_role_that_the_template_does_not_write_is_an_error(text):
    template = chatml_of("m['content']", condition="m['role'] != 'system'")
    error = dropped_of(template, [system(text), user("a system for the user"), assistant("four")])
    assert "does not write message 0 with the role 'system'" in error
    assert dropped_of(template, [user("q"), assistant("four")]) == 0
    assert dropped_of(template, [system(text), user("q"), assistant("four")], dropped_text="warn") == len(
        text.replace(" ", "")
    )


def test_a_user_message_that_the_template_drops_because_of_its_text_is_an_error():
    template = chatml_of("m['content']", condition="'/quiet' not in m['content']")
    error = dropped_of(template, [user("/quiet please"), assistant("four"), user("q"), assistant("five")])
    assert "does not write message 0 with the role 'user'" in error


def test_a_system_message_that_is_written_later_is_not_missing():
    template = (
        "{% for m in messages[1:] %}{{ '<|im_start|>' + m['role'] + '\n' + (messages[0]['content'] + '\n' if loop.last "
        "else '') + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    )
    conversation = [system("Be brief and kind to everyone."), user("What is the sum?"), assistant("It is four.")]
    assert dropped_of(template, conversation) == 0


# --- tool calls and their results


def called(arguments):
    calls = [{"type": "function", "function": {"name": "weather", "arguments": arguments}}]
    return [user("Is it warm?"), {**assistant("I ask."), "tool_calls": calls}, assistant("It is 20 degrees.")]


CALLS = "m['content'] + (m.tool_calls[0].function | string if m.tool_calls else '')"


@pytest.mark.parametrize("arguments", [{"city": "Paris é"}, {"a": [{"b": "it's"}], "c": 2}, "{'city': 1}"])
def test_arguments_that_a_template_prints_as_python_are_not_missing(arguments):
    assert dropped_of(chatml_of(CALLS), called(arguments)) == 0


@pytest.mark.parametrize("role", ["tool", "function", "ipython"])
def test_the_name_in_a_tool_result_need_not_be_written(role):
    result = {"role": role, "name": "weather", "tool_call_id": "call_1", "content": "20 degrees"}
    assert dropped_of(chatml_of("m['content']"), [user("q"), assistant("I ask."), result, assistant("Yes.")]) == 0
