"""Find control tokens in the text of messages, and encode them as plain text.

A tokenizer parses `<|im_end|>` anywhere in a string. Inside a reply, this token would end the turn. To prevent this, a
copy of the tokenizer has random secret names for its control tokens, and the tokens that the chat template writes are
replaced by these names. A control token in a message is then ordinary text, encoded together with the text around it.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Encoding, Tokenizer

from gym_rm.engine.text.messages import map_texts, texts_of
from gym_rm.engine.text.tool_calls import encode_arguments
from gym_rm.errors import ConversationError
from gym_rm.types import Conversation, Message

# Control tokens of common chat templates: `<|im_end|>`, `<eos>`, `<start_of_turn>`, `[INST]`, `<<SYS>>`, ...
COMMON = re.compile(
    r"<[|｜][^<>\n]{1,60}?[|｜]>"
    r"|</?(?:s|bos|eos|pad|unk|mask|sep|cls|sop|eop|think|(?:start|end)_of_\w{1,20}|tools|tool_\w{1,20}|seed:\w{1,20}"
    r"|\w{3,30}_token)>"
    r"|\[/?(?:INST|THINK|IMG\w{0,10}|g?MASK|CLS|SEP|PAD|UNK|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_\w{1,20})\]"
    r"|<</?SYS>>",
    re.IGNORECASE,
)
PRIVATE_USE = range(0xF0000, 0xFFFFE)
# Added tokens that are ordinary text: replies may contain thinking, even if the template writes it, and white space and
# words are no marks. HTML and punctuation are text unless the template has them.
TEXT = re.compile(r"</?think>|\s*[^\W_]*\s*|.")
TEXT_IF_NOT_WRITTEN = re.compile(
    r"</?(table|caption|t(head|body|foot|[rhd])|h\d|blockquote|strong|em|[bius]|su[bp]|code)>|\W*"
)


def spaced(text: str, patterns: Sequence[re.Pattern[str]] = (COMMON,)) -> str:
    """Return a text for a server that would parse its control tokens: spaces are written into them."""
    before = None
    while text != before:  # what is left and right of a spaced token can form another one
        before = text
        for pattern in patterns:
            text = pattern.sub(lambda match: f"{match[0][0]} {match[0][1:-1]} {match[0][-1]}", text)
    return text


def spaced_messages(conversation: Conversation, patterns: Sequence[re.Pattern[str]] = (COMMON,)) -> list[Any]:
    """Return messages as OpenAI's API has them, with `spaced` texts in all their fields."""
    return [encode_arguments(map_texts(each, functools.partial(spaced, patterns=patterns))) for each in conversation]


class ControlTokens:
    """Control tokens of a tokenizer, which the text of a message must not produce.

    Args:
        tokenizer: a Hugging Face tokenizer.
        written: the source of the chat template, and example conversations as it writes them. An added token is a
            control token even if the tokenizer does not flag it as special, unless it is `TEXT`.
    """

    def __init__(self, tokenizer: Any, written: str) -> None:
        added = {str(token): token for token in tokenizer.added_tokens_decoder.values()}
        special = {text for text, token in added.items() if token.special} | set(tokenizer.all_special_tokens)
        markup = {text for text in added if text in written or not TEXT_IF_NOT_WRITTEN.fullmatch(text)}
        self.names = sorted((special | {text for text in markup if not TEXT.fullmatch(text)}) - {""})
        # Ordinary text can also get the id of the unknown token, so this id does not identify a control token.
        self.ids = frozenset(tokenizer.convert_tokens_to_ids(self.names)) - {tokenizer.unk_token_id}
        self._backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
        self._spelled = _any_of(self.names)
        # First and last characters of control tokens. Text that a template moves or cuts can only become a control
        # token if it contains one of them.
        self._ends = _any_of({end for name in self.names for end in (name[0], name[-1])})
        # A normaliser adds spellings of a control token: `<|IM_END|>` if it lower-cases text, full-width letters with
        # NFKC. This affects added tokens that are matched after normalisation, and tokens in the model's vocabulary.
        self._normalize: Callable[[str], str] | None = None
        normalized = {name for name in self.names if name in added and added[name].normalized}
        strips = {name for name, token in added.items() if token.lstrip or token.rstrip or token.single_word}
        self._breaks = {*self.names} & added.keys() - strips
        if self._backend is not None and self._backend.normalizer is not None:
            self._breaks -= normalized  # some normalisers change what is before such a token
            normalize = self._backend.normalizer.normalize_str
            pieces = self._backend.get_vocab(with_added_tokens=False)
            spelled = {name for name in self.names if name in pieces}
            # "a" stands for what precedes: some normalisers add a mark to the beginning of a text.
            spelled |= {normalize(f"a{name}").removeprefix(normalize("a")) for name in normalized}
            if spelled - {""}:
                self._normalize, self._spelled_normalized = normalize, _any_of(spelled)

    def find(self, text: str) -> tuple[str, ...]:
        """Return the control tokens that the tokenizer would find in this text."""
        found = self._spelled.findall(text)
        if self._normalize is not None:
            found += self._spelled_normalized.findall(self._normalize(text))
        return tuple(found)

    def split(self, text: str) -> list[str]:
        """Return the parts of a text; all but the first begin with a control token that divides it."""
        found = (match.start() for match in self._spelled.finditer(text) if match[0] in self._breaks)
        return [text[start:stop] for start, stop in itertools.pairwise([0, *filter(None, found), len(text)])]

    def neutral(self, message: Message, content: str) -> Message:
        """Return the message with this content, and without control tokens in its other fields."""
        hidden = chr(PRIVATE_USE.start)
        copy = map_texts(
            message,
            lambda text: text if text.isidentifier() and not self.find(text) else self._ends.sub(hidden, text),
        )
        copy["content"] = content
        return copy

    def hide(self, conversation: Conversation, write: Callable[[Conversation], str]) -> HiddenText:
        """Return `write(conversation)` with the control tokens in messages hidden, ready to be encoded.

        Raises:
            ConversationError: the template changes the text of a message so that its control tokens cannot be told
                apart from the template's own.
        """
        # Private-use characters instead of words hide control tokens and text that a template reacts to.
        masks = (re.sub(r"\S", chr(PRIVATE_USE.start), message["content"]) for message in conversation)
        neutral = [self.neutral(message, mask) for message, mask in zip(conversation, masks, strict=True)]
        expected = self._spelled.findall(write(neutral))
        # First hide the control tokens in messages. If the template then still forms a control token by cutting or
        # joining text, hide every first and last character of a control token instead.
        for pattern in (self._spelled, self._ends):
            hidden = _Hidden(pattern, conversation)
            text = write(hidden.conversation)
            if self._spelled.findall(text) == expected:
                break
        else:
            raise ConversationError(
                "the chat template turns the text of a message into control tokens, which cannot be told apart from "
                "the template's own; change the message or the chat template."
            )
        again = _Hidden(pattern, conversation)
        original = hidden.reveal(text)
        if original != again.reveal(write(again.conversation)):
            raise ConversationError(
                "a message contains a control token of the reward model, and the chat template changes it; remove the "
                "token from the message."
            )
        found = self._positions(text)
        named = self._spelled.sub(lambda at: self._secret_names[at[0]] if at.start() in found else at[0], text)
        return HiddenText(original, hidden.reveal(named), len(found))

    def _positions(self, text: str) -> set[int]:
        """Return where the tokenizer finds control tokens in a text; some count only behind certain characters."""
        spelled = {match.start() for match in self._spelled.finditer(text)}
        if self._backend is None or self._breaks.issuperset(self.names):
            return spelled
        encoding = self._backend.encode(text, add_special_tokens=False)
        found = (range(*at) for at, token in zip(encoding.offsets, encoding.ids, strict=True) if token in self.ids)
        return spelled & set(itertools.chain.from_iterable(found))

    def encode(self, hidden: HiddenText) -> Encoding:
        """Encode the original text. Only the control tokens that the template wrote become control tokens.

        Raises:
            ConversationError: the tokenizer does not recognise them.
        """
        encoding = self._tokenizer.encode(hidden.named, add_special_tokens=False)
        if sum(token in self.ids for token in encoding.ids) < hidden.num_control_tokens:
            raise ConversationError(
                "the tokenizer does not recognise every control token that the chat template writes."
            )
        return encoding

    def encode_pair(self, first: str, second: str) -> Encoding:
        """Encode a pair of texts, with the tokenizer's own special tokens around them and none inside them."""
        return self._tokenizer.encode(first, second, add_special_tokens=True)

    @functools.cached_property
    def _secret_names(self) -> dict[str, str]:
        return {name: _secret(8, set()) for name in self.names}

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        """Copy of the tokenizer in which every control token has its secret name."""
        if self._backend is None:
            raise ConversationError(
                "a message contains a control token of the reward model, which this slow tokenizer cannot encode as "
                "plain text; remove the token from the message or use a fast tokenizer."
            )
        state = json.loads(self._backend.to_str())
        state["truncation"] = state["padding"] = None
        for token in state["added_tokens"]:
            if token["content"] in self._secret_names:
                token["content"] = hidden = self._secret_names[token["content"]]
                normalize = self._backend.normalizer.normalize_str if self._backend.normalizer else str
                token["normalized"] &= hidden in normalize(hidden)  # some normalisers remove private-use characters
        model = state["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {self._secret_names.get(piece, piece): index for piece, index in model["vocab"].items()}
        else:
            model["vocab"] = [[self._secret_names.get(piece, piece), score] for piece, score in model["vocab"]]
        if "merges" in model:
            model["merges"] = [pair for pair in model["merges"] if self._keeps(pair, model)]
        if model.get("unk_token") in self._secret_names:
            model["unk_token"] = self._secret_names[model["unk_token"]]
        copy = Tokenizer.from_str(json.dumps(state))
        own = self._backend.token_to_id
        moved = [name for name, hidden in self._secret_names.items() if copy.token_to_id(hidden) != own(name)]
        if moved:
            raise ConversationError(
                f"control tokens {moved} have different ids in the tokenizer and in its internal copy."
            )
        return copy

    def _keeps(self, pair: Sequence[str] | str, model: dict[str, Any]) -> bool:
        """Return whether to keep a BPE merge. Merges that build a control token from ordinary text are removed."""
        left, right = pair.split(" ") if isinstance(pair, str) else pair
        merged = left + right.removeprefix(model.get("continuing_subword_prefix") or "")
        return not {left, right, merged} & self._secret_names.keys()


@dataclass(frozen=True, slots=True)
class HiddenText:
    """Text that a template writes for a conversation whose messages contain control tokens.

    Attributes:
        original: the text.
        named: the text with secret names for the template's own control tokens, to encode with `ControlTokens.encode`.
        num_control_tokens: number of the template's own control tokens.
    """

    original: str
    named: str
    num_control_tokens: int


class _Hidden:
    """A conversation in which a secret word replaces every match of a pattern. `reveal` undoes the replacement."""

    def __init__(self, pattern: re.Pattern[str], conversation: Conversation) -> None:
        self._pattern = pattern
        self._spellings: dict[str, str] = {}  # secret word: text it replaces
        self._words: dict[str, str] = {}  # text: secret word that replaces it
        used = set().union(*(text for message in conversation for text in texts_of(message)))
        self._taken = {ord(char) for char in used} & {*PRIVATE_USE}
        self.conversation = [map_texts(message, lambda text: pattern.sub(self._word, text)) for message in conversation]

    def reveal(self, text: str) -> str:
        for word, spelling in self._spellings.items():
            text = text.replace(word, spelling)
        return text

    def _word(self, match: re.Match[str]) -> str:
        if match[0] not in self._words:
            # A secret word has the length of the text it replaces and contains no character of the conversation.
            word = _secret(len(match[0]), self._taken)
            self._words[match[0]], self._spellings[word] = word, match[0]
        return self._words[match[0]]


def _secret(length: int, taken: set[int]) -> str:
    """Return a random word of private-use characters that are not in `taken`, and add them to `taken`."""
    if len(taken) + 2 * length > len(PRIVATE_USE):
        raise ConversationError("the conversation has nearly all private-use characters; remove them.")
    word = ""
    while len(word) < length:
        code = PRIVATE_USE.start + secrets.randbelow(len(PRIVATE_USE))
        if code not in taken:
            taken.add(code)
            word += chr(code)
    return word


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of texts, the longest first."""
    ordered = sorted({*texts} - {""}, key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
