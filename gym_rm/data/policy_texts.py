"""Recover the messages of a text that a trainer rendered with the chat template of its policy.

Some trainers store a prompt only as the text that the policy reads. A reward model has a different template, so it
needs the messages. `PolicyTexts` renders a conversation of markers to find the text between turns, and splits prompts
at this text. It renders the result again, and raises an error if the text is not the same.
"""

from __future__ import annotations

import re
from typing import Any

import jinja2

from gym_rm.data.messages import prompt_messages
from gym_rm.engine.text.tokenizers import load_tokenizer
from gym_rm.errors import ConfigError, ConversationError
from gym_rm.types import Conversation, Message

_SYSTEM, _USER, _ASSISTANT, _LAST = (f"MARKER {name}" for name in ("ONE", "TWO", "THREE", "FOUR"))


class PolicyTexts:
    """Convert a trainer's prompt texts, with or without a reply, back to messages.

    Args:
        tokenizer: the policy's tokenizer, or the folder or hub id to load it from.
        apply_chat_template: whether the trainer renders its prompts with the tokenizer's chat template. If not, a
            prompt is the text of one user message.
        chat_template_kwargs: extra variables that the trainer passes to the chat template.

    Raises:
        ConfigError: the tokenizer cannot be loaded, has no chat template, or its template does not write turns one
            after the other.

    Example:
        >>> import importlib.resources
        >>> texts = PolicyTexts(str(importlib.resources.files("gym_rm") / "assets" / "policy"))
        >>> texts.messages("<|im_start|>user\\n2 + 2?<|im_end|>\\n<|im_start|>assistant\\n")
        [{'role': 'user', 'content': '2 + 2?'}]
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        apply_chat_template: bool = True,
        **chat_template_kwargs: Any,
    ) -> None:
        if isinstance(tokenizer, str):
            tokenizer = load_tokenizer(tokenizer)
        self._tokenizer = tokenizer
        self._rendered = apply_chat_template
        self._variables = chat_template_kwargs
        ends = {tokenizer.eos_token, tokenizer.pad_token} - {None}
        if apply_chat_template:
            self._learn()
            ends |= {token for token in tokenizer.all_special_tokens if self._to_user.startswith(token)}
        self._ends = re.compile(f"(?:{'|'.join(map(re.escape, sorted(ends)))})+$") if ends else re.compile("$")

    def messages(self, prompt: str) -> list[Message]:
        """Return the messages of a prompt text, without its generation prompt.

        Raises:
            ConversationError: the messages do not render to this text.
        """
        if not self._rendered:
            return prompt_messages(prompt, "a prompt")
        messages = self._read(prompt)
        if self._render(messages) != prompt:
            raise ConversationError(
                "the prompt was not written by the chat template of policy_tokenizer: its messages render to "
                f"{self._render(messages)!r:.300}, but the prompt is {prompt!r:.300}."
            )
        return messages

    def conversation(self, prompt: str, text: str) -> Conversation:
        """Return the conversation of a text that consists of a prompt text and the policy's reply.

        All text after the prompt is one reply, even if the policy sampled control tokens. Only end tokens at the end of
        the reply are removed.

        Raises:
            ConversationError: the text does not begin with the prompt, or the prompt cannot be read.
        """
        if not text.startswith(prompt):
            raise ConversationError(
                "the text does not begin with its prompt (was the prompt truncated?), so the reply cannot be found: "
                f"the prompt is {prompt!r:.200}, the text is {text!r:.200}."
            )
        return [*self.messages(prompt), Message(role="assistant", content=self.reply(text[len(prompt) :]))]

    def reply(self, text: str) -> str:
        """Return a reply as the policy wrote it, without the end tokens at its end."""
        return self._ends.sub("", text)

    def split(self, text: str) -> Conversation:
        """Return the conversation of a text whose last reply begins where the template last starts one.

        Only for texts whose prompt is not known: a policy that writes the template's own markup moves the start.

        Raises:
            ConversationError: the text has no start of a reply after a user message, or its prompt cannot be read.
        """
        start = text.rfind(self._to_reply) if self._rendered else -1
        if start < 0:
            raise ConversationError(
                "the start of the reply was not found; the text must be a prompt and a reply in the chat template of "
                f"policy_tokenizer: {text!r:.300}"
            )
        return self.conversation(text[: start + len(self._to_reply)], text)

    def _read(self, prompt: str) -> list[Message]:
        messages: list[Message] = []
        rest = prompt.removesuffix(self._to_reply)
        # If the template has a default system message, both starts can match; the longer one is correct.
        start = max((start for start in self._starts if rest.startswith(start)), key=len, default="")
        if self._system is not None and start == self._system[0]:
            content, _, rest = rest.removeprefix(self._system[0]).partition(self._system[1])
            messages.append(Message(role="system", content=content))
        else:
            rest = rest.removeprefix(start)
        separator, speaker = " ", "user"
        while separator:
            content, separator, rest = rest.partition(self._to_assistant if speaker == "user" else self._to_user)
            messages.append(Message(role=speaker, content=content))
            speaker = "assistant" if speaker == "user" else "user"
        return messages

    def _learn(self) -> None:
        """Find the text that the template writes between turns."""
        if not getattr(self._tokenizer, "chat_template", None):
            raise ConfigError(
                "policy_tokenizer has no chat template, so the trainer cannot have applied one; pass "
                "apply_chat_template=False if prompts are plain texts."
            )
        pieces = self._pieces((_USER, _ASSISTANT, _LAST))
        if pieces is None:
            raise ConfigError(
                "the chat template of policy_tokenizer does not write the turns one after the other, so the messages "
                "of a prompt cannot be recovered."
            )
        start, self._to_assistant, self._to_user, self._to_reply = pieces
        with_system = self._pieces((_SYSTEM, _USER, _ASSISTANT, _LAST))
        self._system = None if with_system is None or with_system[0] == start else with_system[:2]
        self._starts = [start] if self._system is None else [start, self._system[0]]

    def _pieces(self, contents: tuple[str, ...]) -> list[str] | None:
        """Return the text before, between and after the contents, or None if the template does not write them all."""
        roles = ("system", "user", "assistant", "user")[-len(contents) :]
        try:
            text = self._render([Message(role=r, content=c) for r, c in zip(roles, contents, strict=True)])
        except ConversationError:
            return None
        pattern = "|".join(contents)
        pieces = re.split(pattern, text)
        return pieces if re.findall(pattern, text) == list(contents) and all(pieces[1:]) else None

    def _render(self, messages: list[Message]) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **self._variables
            )
        except jinja2.TemplateError as error:
            raise ConversationError(
                f"the chat template of policy_tokenizer cannot write {messages!r:.300}: {error}"
            ) from error
        return text


def decode_reply(tokenizer: Any, token_ids: Any) -> str:
    """Return the text of a reply without end tokens. Other special tokens stay: some mark thinking."""
    return without_end_tokens(tokenizer, str(tokenizer.decode(token_ids, skip_special_tokens=False)))


def without_end_tokens(tokenizer: Any, text: str) -> str:
    """Return the text of a reply without the tokenizer's end tokens at its end."""
    ends = tuple(token for token in (tokenizer.eos_token, tokenizer.pad_token) if token)
    while ends and text.endswith(ends):
        text = next(text.removesuffix(token) for token in ends if text.endswith(token))
    return text
