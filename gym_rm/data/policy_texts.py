"""The rule for what a reply is: recover the messages of a text that a trainer rendered with the policy's chat template.

Some trainers store a prompt only as the text that the policy reads. A reward model has a different template, so it
needs the messages. `PolicyTexts` renders a conversation of markers to find the text between turns, and splits prompts
at this text. It renders the result again, and raises an error if the text is not the same.

A reply ends before its end tokens: those of the tokenizer, of the generation configuration, and the one that the
template writes after a turn.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import jinja2
from transformers import GenerationConfig

from gym_rm.data.messages import prompt_messages
from gym_rm.engine.text.tokenizers import load_tokenizer
from gym_rm.errors import ConfigError, ConversationError
from gym_rm.types import Conversation, Message

_SYSTEM, _USER, _ASSISTANT, _LAST = (f"MARKER {name}" for name in ("ONE", "TWO", "THREE", "FOUR"))
_RESULTS = ("MARKER FIVE", "MARKER SIX")


class PolicyTexts:
    """Convert a trainer's prompt texts, with or without a reply, back to messages.

    Args:
        tokenizer: the policy's tokenizer, or the folder or hub id to load it from.
        apply_chat_template: whether the trainer renders its prompts with the tokenizer's chat template. If not, a
            prompt is the text of one user message.
        end_token_ids: further ids of tokens that end a reply, such as `eos_token_id` of the model's generation
            configuration, which is also read where the tokenizer was loaded from.
        chat_template_kwargs: extra variables that the trainer passes to the chat template.

    Raises:
        ConfigError: the tokenizer cannot be loaded, has no chat template, or its template does not write turns one
            after the other.

    Example:
        >>> import importlib.resources
        >>> texts = PolicyTexts(str(importlib.resources.files("gym_rm") / "assets" / "policy"))
        >>> texts.messages("<|im_start|>user\\n2 + 2?<|im_end|>\\n<|im_start|>assistant\\n")
        [{'role': 'user', 'content': '2 + 2?'}]
        >>> texts.reply("4<|im_end|>\\n")
        '4'
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        apply_chat_template: bool = True,
        end_token_ids: Iterable[int] = (),
        **chat_template_kwargs: Any,
    ) -> None:
        if isinstance(tokenizer, str):
            tokenizer = load_tokenizer(tokenizer)
        self._tokenizer = tokenizer
        self._rendered = apply_chat_template
        self._variables = chat_template_kwargs
        ids = {*end_token_ids, *_generation_ends(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id} - {None}
        ends = (tokenizer.decode([each], skip_special_tokens=False) for each in ids)
        self._ends = {end for end in ends if end.strip()}
        self._in_prompt: Mapping[str, re.Pattern[str]] = {}
        self._in_response: Mapping[str, re.Pattern[str]] = {}
        try:
            self._learn()
        except (ConfigError, ConversationError):
            if apply_chat_template:
                raise

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

        Raises:
            ConversationError: the text does not begin with the prompt, the prompt cannot be read, or the reply contains
                further turns.
        """
        if not text.startswith(prompt):
            raise ConversationError(
                "the text does not begin with its prompt (was the prompt truncated?), so the reply cannot be found: "
                f"the prompt is {prompt!r:.200}, the text is {text!r:.200}."
            )
        return [*self.messages(prompt), Message(role="assistant", content=self.only_reply(text[len(prompt) :]))]

    def reply(self, text: str) -> str:
        """Return a reply as the policy wrote it, without the end tokens at its end and the space after them."""
        stop = len(text)
        while True:  # by positions: a text of a million end tokens is not copied a million times
            last = stop
            while last and text[last - 1].isspace():
                last -= 1
            end = next((end for end in self._ends if text.endswith(end, 0, last)), None)
            if end is None:
                return text[:stop]
            stop = last - len(end)

    def only_reply(self, text: str) -> str:
        """Return the reply of a response that may hold a whole dialogue, which the trainer does not tell.

        Raises:
            ConversationError: the text goes on with another turn in the policy's template.
        """
        turn = self._in_response["assistant"].search(text) if self._in_response else None
        if turn is not None:
            raise ConversationError(
                f"the response goes on with a further turn, at {turn[0]!r}, and would be scored as one reply. If the "
                "trainer writes dialogues or results of tools, score their messages; if the policy wrote it, let "
                f"generation stop at the token that ends a turn. The response is {text!r:.300}."
            )
        return self.reply(text)

    def decode(self, token_ids: Any) -> str:
        """Return the text of token ids. Special tokens stay: some mark thinking, others turns."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))

    def turns(self, text: str) -> Conversation:
        """Return the messages of a response to a prompt that holds a dialogue, as agent loops write it.

        It begins with a reply; results of tools and messages of the user follow in the policy's template. A policy
        that writes the template's own markup forges turns: compare their number with that of the loop, which misses
        only a result of a tool that stands before a real one.

        Raises:
            ConfigError: the chat template does not write turns one after the other.
        """
        if not self._in_response:
            self._learn()
        messages = self._split_turns(text, "assistant", self._in_response)
        for message in messages:
            if message["role"] == "assistant":
                message["content"] = self.reply(message["content"])
        return messages

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
        suffix = max((suffix for suffix in self._to_replies if prompt.endswith(suffix)), key=len, default="")
        rest = prompt.removesuffix(suffix)
        # If the template has a default system message, both starts can match; the longer one is correct.
        start = max((start for start in self._starts if rest.startswith(start)), key=len, default="")
        if self._system is not None and start == self._system[0]:
            content, _, rest = rest.removeprefix(self._system[0]).partition(self._system[1])
            messages.append(Message(role="system", content=content))
        else:
            rest = rest.removeprefix(start)
        return [*messages, *self._split_turns(rest, "user", self._in_prompt)]

    @staticmethod
    def _split_turns(text: str, speaker: str, separators: Mapping[str, re.Pattern[str]]) -> list[Message]:
        """Split a text that begins inside of a message of the speaker; a separator's group is the next speaker."""
        messages, start = [], 0
        while True:
            match = separators[speaker].search(text, start) if speaker in separators else None
            messages.append(Message(role=speaker, content=text[start : match.start() if match else len(text)]))
            if match is None:
                return messages
            start, speaker = match.end(), str(match.lastgroup)

    def _learn(self) -> None:
        """Find the text that the template writes between turns."""
        if not getattr(self._tokenizer, "chat_template", None):
            raise ConfigError(
                "policy_tokenizer has no chat template, so the trainer cannot have applied one; pass "
                "apply_chat_template=False if prompts are plain texts."
            )
        asked, replied = ("user", _USER), ("assistant", _ASSISTANT)
        pieces = self._pieces(asked, replied, ("user", _LAST))
        if pieces is None:
            raise ConfigError(
                "the chat template of policy_tokenizer does not write the turns one after the other, so the messages "
                "of a prompt cannot be recovered."
            )
        start, to_assistant, to_user, self._to_reply = pieces
        self._to_replies = [self._to_reply]
        with_system = self._pieces(("system", _SYSTEM), asked, replied, ("user", _LAST))
        self._system = None if with_system is None or with_system[0] == start else with_system[:2]
        self._starts = [start] if self._system is None else [start, self._system[0]]

        closing = self._render([Message(role=role, content=text) for role, text in (asked, replied)], prompt=False)
        added = (str(token) for token in self._tokenizer.added_tokens_decoder.values() if token.special)
        ends = {*self._tokenizer.all_special_tokens, *added, *closing.partition(_ASSISTANT)[2].split()[:1]}
        self._ends |= {end for end in ends if to_user.lstrip().startswith(end)}

        in_prompt = {"assistant": {"user": to_user}, "user": {"assistant": to_assistant}}
        in_response = {"assistant": {"user": to_user}, "user": {"assistant": self._to_reply}}
        results = self._pieces(asked, replied, *(("tool", text) for text in _RESULTS), ("assistant", _LAST))
        result = self._pieces(asked, replied, ("tool", _RESULTS[0]))
        if results is not None and result is not None and results[2] != to_user:
            for separators, reply in ((in_prompt, results[4]), (in_response, result[3])):
                separators["assistant"]["tool"] = results[2]
                separators["tool"] = {"tool": results[3], "assistant": reply}
            self._to_replies.append(result[3])
        self._in_prompt = {speaker: self._pattern(each, ended=False) for speaker, each in in_prompt.items()}
        self._in_response = {speaker: self._pattern(each, ended=True) for speaker, each in in_response.items()}

    def _pattern(self, separators: Mapping[str, str], *, ended: bool) -> re.Pattern[str]:
        """Return the pattern of the texts between two turns, in which each is a group with the next speaker's name.

        In a response (`ended`), any end token stands for the one of the template, and the space around it may lack:
        the policy samples the one and not the other.
        """
        patterns = {}
        for speaker, text in sorted(separators.items(), key=lambda item: -len(item[1])):
            patterns[speaker] = re.escape(text)
            rest = text.lstrip()
            rest = next((rest.removeprefix(end).lstrip() for end in self._ends if rest.startswith(end)), rest)
            if ended and rest and self._ends:
                ends = "|".join(map(re.escape, sorted(self._ends)))
                patterns[speaker] += rf"|(?:{ends})\s*{re.escape(rest)}"
        return re.compile("|".join(f"(?P<{speaker}>{pattern})" for speaker, pattern in patterns.items()))

    def _pieces(self, *turns: tuple[str, str]) -> list[str] | None:
        """Return the text before, between and after the contents, or None if the template does not write them all."""
        try:
            text = self._render([Message(role=role, content=content) for role, content in turns])
        except ConversationError:
            return None
        contents = [content for _, content in turns]
        pattern = "|".join(contents)
        pieces = re.split(pattern, text)
        return pieces if re.findall(pattern, text) == contents and all(pieces[1:]) else None

    def _render(self, messages: list[Message], *, prompt: bool = True) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=prompt, **self._variables
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise ConversationError(
                f"the chat template of policy_tokenizer cannot write {messages!r:.300}: {error}"
            ) from error
        return text


def _generation_ends(tokenizer: Any) -> list[int]:
    """Return the end tokens of the generation configuration that lies beside the tokenizer, on this machine."""
    if not tokenizer.name_or_path:
        return []
    try:
        ids = GenerationConfig.from_pretrained(tokenizer.name_or_path, local_files_only=True).eos_token_id
    except (OSError, TypeError, ValueError):
        return []
    return [each for each in (ids if isinstance(ids, list) else [ids]) if type(each) is int and each >= 0]
