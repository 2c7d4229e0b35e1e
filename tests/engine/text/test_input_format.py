import pytest
import tiny_models

from gym_rm.engine.text.input_format import InputFormat
from gym_rm.engine.text.renderer import Renderer
from tests.engine.text.rendering import assistant, ids_of, text_of, user

STEP = "<|endoftext|>"


def test_the_generation_prompt_is_only_added_on_request():
    assert not text_of(Renderer(tiny_models.tokenizer("chatml")), [user("q"), assistant("a")]).endswith("assistant\n")
    with_prompt = Renderer(tiny_models.tokenizer("chatml"), input_format=InputFormat(generation_prompt=True))
    assert text_of(with_prompt, [user("q")]).endswith("<|im_start|>assistant\n")


def test_a_question_is_added_after_the_conversation():
    renderer = Renderer(tiny_models.tokenizer("chatml"), input_format=InputFormat(question="Good?"))
    plain = Renderer(tiny_models.tokenizer("chatml"))
    conversation = [user("q"), assistant("a")]
    assert ids_of(renderer, conversation) == ids_of(plain, [*conversation, user("Good?")])


def test_every_step_of_the_last_reply_gets_a_step_token():
    renderer = Renderer(tiny_models.tokenizer("chatml"), input_format=InputFormat(step_token=STEP))
    conversation = [user("q\n\nr"), assistant("x\n\ny"), user("q"), assistant(" one \n\n\n\ntwo\n\n \n\nthree")]
    text = text_of(renderer, conversation)
    assert text.endswith(f"assistant\none{STEP}two{STEP}three{STEP}<|im_end|>\n")
    assert text.count(STEP) == 3


def test_a_reply_cannot_write_a_step_token():
    renderer = Renderer(tiny_models.tokenizer("chatml"), input_format=InputFormat(step_token=STEP))
    step = renderer.tokenizer.convert_tokens_to_ids(STEP)
    ids = ids_of(renderer, [user("q"), assistant(f"one{STEP}\n\ntwo")])
    assert ids.count(step) == 2


def test_a_template_that_writes_the_step_token_itself_is_an_error():
    input_format = InputFormat(step_token=STEP)
    renderer = Renderer(
        tiny_models.tokenizer("chatml"), input_format=input_format, chat_template=STEP + tiny_models.CHATML
    )
    (error,) = renderer.encode([[user("q"), assistant("one")]])
    assert "expected the step token '<|endoftext|>' 1 times, once per step" in str(error)
    assert "the text contains it 2 times" in str(error)


def test_the_start_of_the_reply_is_found():
    tok = tiny_models.tokenizer("chatml")
    renderer = Renderer(tok, input_format=InputFormat(mark_reply=True))
    (one,) = renderer.encode([[user("q"), assistant("the reply")]])
    assert tok.decode(one.input_ids[one.reply_start :]) == "the reply<|im_end|>\n"


@pytest.mark.parametrize("conversation", [[user("q")], [assistant("a")], [user("q"), user("r")]])
def test_finding_the_reply_requires_a_prompt_and_a_reply(conversation):
    (error,) = Renderer(tiny_models.tokenizer("chatml"), input_format=InputFormat(mark_reply=True)).encode(
        [conversation]
    )
    assert "must end with a reply of the assistant to a prompt" in str(error)
