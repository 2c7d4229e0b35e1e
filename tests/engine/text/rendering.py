"""Helpers for the tests of rendering: tokenizers of several styles, messages, and the ids and text of a conversation.

This is not a test file. `ids_of(renderer, conversation)` and `text_of(renderer, conversation)` render one conversation.
"""

import functools

import pytest
import tiny_models
from tokenizers import processors

from gym_rm.engine.text.renderer import Renderer
from gym_rm.errors import ConversationError

STYLES = ("chatml", "qwen", "llama3", "gemma", "mistral", "plain", "unigram")
each_style = pytest.mark.parametrize("style", STYLES)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def system(text):
    return {"role": "system", "content": text}


def ids_of(renderer, conversation):
    (one,) = renderer.encode([conversation])
    if isinstance(one, ConversationError):
        raise one
    return one.input_ids.tolist()


def text_of(renderer, conversation):
    return renderer.tokenizer.decode(ids_of(renderer, conversation))


def bos_adding(style, **overrides):
    """Return a tokenizer that adds its BOS to every text, as the tokenizers of Llama and Gemma do."""
    tok = tiny_models.tokenizer(style, **overrides)
    pair = (tok.bos_token, tok.bos_token_id)
    tok.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{tok.bos_token} $A", pair=f"{tok.bos_token} $A {tok.bos_token} $B", special_tokens=[pair]
    )
    return tok


@functools.cache
def renderer_of(style):
    return Renderer(tiny_models.tokenizer(style))
