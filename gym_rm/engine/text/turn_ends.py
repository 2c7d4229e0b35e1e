"""Find where each turn ends in the text of a dialogue, with one rendering instead of one for every turn.

The text of the first k messages begins as the text of all messages does, up to the moment at which the template first
looks at message k, at the number of messages or at their end. If the template looks because its last loop asks for the
next message, then only what it writes after this loop is missing. It must be the same for all conversations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import numpy as np
from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from gym_rm.engine.text.rendered import TokenIds
from gym_rm.types import Conversation

LOOKS_AHEAD = frozenset({"last", "nextitem", "length", "revindex", "revindex0"})  # attributes of Jinja's `loop`


def find_turn_ends(
    template: str, conversation: Conversation, text: str, variables: Mapping[str, Any]
) -> tuple[dict[int, int], str]:
    """Return lengths by k, and a text: the text of the first k messages is `text[: lengths[k]]` and this text.

    Values of k whose length is unknown are missing.

    Args:
        template: Jinja source of the chat template.
        conversation: the conversation.
        text: the text that the template writes for it.
        variables: variables of the template.
    """
    instrumented = _instrument(template)
    if instrumented is None:
        return {}, ""
    watch = _Watch(len(conversation))
    messages = _Watched([dict(message) for message in conversation], watch)
    pieces = []
    try:
        for piece in instrumented.generate(
            messages=messages, tools=None, documents=None, add_generation_prompt=False, _watch=watch, **variables
        ):
            pieces.append(piece)
            watch.length += len(piece)
    except Exception:  # a template can raise any exception; the caller renders every turn
        return {}, ""
    end = watch.ends.pop(len(conversation), None)
    return ({}, "") if end is None or "".join(pieces) != text else (watch.ends, text[end:])


class EncodedDialogue:
    """Token ids of a whole dialogue, from which the ids of its first turns are cut.

    A text that ends directly before a control token of the dialogue has the ids up to this token. Other texts have the
    ids up to the last control token before their end, and those of the text from there on.

    Args:
        text: the text of the dialogue.
        ids: its token ids `[L]`.
        starts: for each token, the position of its first character.
        control: ids of the control tokens.
        tokenize: function that returns the ids of a text.
    """

    def __init__(
        self,
        text: str,
        ids: Sequence[int],
        starts: Sequence[int],
        control: Collection[int],
        tokenize: Callable[[str], Sequence[int]],
    ) -> None:
        self.ids: TokenIds = np.array(ids, dtype=np.int32)
        self._text = text
        self._control = np.flatnonzero(np.isin(self.ids, list(control)))
        self._starts = np.array(starts, dtype=np.int64)[self._control]
        self._tokenize = tokenize

    def cut(self, end: int, after: str = "") -> TokenIds | None:
        """Return the ids of the text up to `end`, and of the text `after`; None if no control token comes before."""
        before = int(np.searchsorted(self._starts, end))
        if not before:
            return None
        if not after and before < len(self._starts) and self._starts[before] == end:
            return self.ids[: self._control[before]]
        rest = self._tokenize(self._text[self._starts[before - 1] : end] + after)
        return np.concatenate([self.ids[: self._control[before - 1]], np.array(rest, dtype=np.int32)])


class _Watch:
    """What the template has looked at so far.

    Attributes:
        length: number of characters written.
        ends: number of characters before the end of the loop over the first k messages, by k.
    """

    def __init__(self, count: int) -> None:
        self.length = 0
        self.ends: dict[int, int] = {}
        self._count = count
        self._seen = 0

    def look(self, index: int | None, *, ends: bool = False) -> None:
        """Note that the template looks at a message, or with None at the number of messages.

        Args:
            index: index of the message.
            ends: whether the text of a conversation without this message ends here.
        """
        index = self._count if index is None else min(index, self._count)
        if index > self._seen and ends:
            self.ends[index] = self.length
        self._seen = max(self._seen, index)


class _Watched(Sequence[Any]):
    """The messages from `start` on. It notes everything in which a shorter conversation would differ."""

    def __init__(self, messages: list[dict[str, Any]], watch: _Watch, start: int = 0) -> None:
        self._messages = messages
        self._watch = watch
        self._start = start

    def __len__(self) -> int:
        self._watch.look(None)
        return len(self._messages) - self._start

    def __bool__(self) -> bool:
        self._watch.look(self._start)
        return len(self._messages) > self._start

    def __eq__(self, other: object) -> bool:
        self._watch.look(None)
        return self._messages[self._start :] == other

    __hash__ = None  # type: ignore[assignment]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            start = 0 if index.start is None else index.start
            if start >= 0 and index.stop is None and index.step in (None, 1):
                return _Watched(self._messages, self._watch, self._start + start)
        if not isinstance(index, int) or index < 0:
            self._watch.look(None)
        else:
            self._watch.look(self._start + index)
            return self._messages[self._start + index]
        return self._messages[self._start :][index]

    def __iter__(self) -> Iterator[Any]:
        return self.iterate(ends=False)

    def iterate(self, *, ends: bool) -> Iterator[Any]:
        """Yield the messages; with `ends`, the text ends where there is no next message."""
        for index in range(self._start, len(self._messages)):
            self._watch.look(index, ends=ends)
            yield self._messages[index]
        self._watch.look(None, ends=ends)


class _LastLoop:
    """The messages for the last loop of the template."""

    def __init__(self, messages: _Watched) -> None:
        self._messages = messages

    def __iter__(self) -> Iterator[Any]:
        return self._messages.iterate(ends=True)

    def __len__(self) -> int:
        return len(self._messages)


@functools.lru_cache(maxsize=16)
def _instrument(template: str) -> jinja2.Template | None:
    """Return the template with notes for the last loop; None if it has a form for which the ends are not known."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.globals |= {"_last_loop": _last_loop, "_look_ahead": _look_ahead, "raise_exception": _raise}
    try:
        tree = environment.parse(template)
    except jinja2.TemplateSyntaxError:  # an unknown tag
        return None
    body = list(tree.body)
    while body and _is_constant(body[-1]):
        body.pop()
    if not body or not isinstance(body[-1], nodes.For) or body[-1].else_ or body[-1].recursive:
        return None
    loops = sum(isinstance(node.node, nodes.Name) and node.node.name == "loop" for node in tree.find_all(nodes.Getattr))
    if loops != sum(node.name == "loop" for node in tree.find_all(nodes.Name)):
        return None
    body[-1].iter = _call("_last_loop", body[-1].iter)
    _MarkLooks().visit(tree)
    nodes.Template.set_environment(tree, environment)
    return jinja2.Template.from_code(environment, environment.compile(tree), environment.globals)


def _is_constant(node: nodes.Node) -> bool:
    """Return whether a part of the template writes the same text for all conversations, without a generation prompt."""
    if isinstance(node, nodes.If):
        return _needs_generation_prompt(node.test) and not node.elif_ and all(map(_is_constant, node.else_))
    if isinstance(node, nodes.Output):
        return all(isinstance(each, nodes.TemplateData) or _is_token(each) for each in node.nodes)
    return isinstance(node, nodes.Assign | nodes.Macro)


def _is_token(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Name) and node.name in ("bos_token", "eos_token")


def _needs_generation_prompt(test: nodes.Node) -> bool:
    """Return whether a condition is false without a generation prompt."""
    if isinstance(test, nodes.And):
        return _needs_generation_prompt(test.left) or _needs_generation_prompt(test.right)
    return isinstance(test, nodes.Name) and test.name == "add_generation_prompt"


class _Generation(jinja2.ext.Extension):
    """The tag `generation` of transformers, which writes its contents."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _MarkLooks(NodeTransformer):
    """Replaces `loop.last` by `_look_ahead(loop).last`, and so on, except where a generation prompt is written."""

    def visit_If(self, node: nodes.If) -> nodes.Node:
        if _needs_generation_prompt(node.test):
            node.test = nodes.Const(False, lineno=node.lineno)
        self.generic_visit(node)
        return node

    def visit_Getattr(self, node: nodes.Getattr) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.node, nodes.Name) and node.node.name == "loop" and node.attr in LOOKS_AHEAD:
            node.node = _call("_look_ahead", node.node, nodes.Name("_watch", "load"))
        return node


def _call(name: str, *arguments: nodes.Node) -> nodes.Call:
    call = nodes.Call(nodes.Name(name, "load"), list(arguments), [], None, None)
    return call.set_lineno(arguments[0].lineno, override=True)  # type: ignore[return-value]


def _last_loop(messages: Any) -> Any:
    return _LastLoop(messages) if isinstance(messages, _Watched) else messages


def _look_ahead(loop: Any, watch: _Watch) -> Any:
    watch.look(None)
    return loop


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
