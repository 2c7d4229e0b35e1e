"""Are the scores of a server those of the model in this process, and if not, which fault explains the difference?

A fault is tested by computing the scores that the model would give with it, and comparing them with the server's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from gym_rm.data.rows import rows_of
from gym_rm.data.scored_rows import row_to_score
from gym_rm.engine.loading.checkpoint import open_checkpoint, split_options
from gym_rm.engine.loading.fidelity import SHIPPED, read_pairs
from gym_rm.engine.reward_model_scorer import load_reward_model
from gym_rm.engine.text.rendered import Rendered
from gym_rm.engine.text.renderer import Renderer
from gym_rm.errors import ConfigError
from gym_rm.scorers.remote.asked import AskedServer, Form
from gym_rm.scores import RewardArray, Scores, ScoringError
from gym_rm.types import Conversation, Message

Ids: TypeAlias = list[int]
Predictions: TypeAlias = Iterable[tuple[str, RewardArray]]
MOST_ROWS = 64
ROUNDING = 2e-4  # largest difference of two right forwards in float32, relative to the largest score
LEAST_EXPLAINED = 0.98  # by a cause, if what is left is more than rounding in float32
PROMPTS = ("You are a helpful assistant.", "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.")
MARKUP = {
    "no chat template, the contents alone": "{content}\n",
    "no chat template, 'role: content'": "{role}: {content}\n",
    "another chat template, ChatML": "<|im_start|>{role}\n{content}<|im_end|>\n",
}


@dataclass(frozen=True, slots=True)
class Cause:
    """A fault: how many rows it would change, and the largest difference from the scores with it.

    `explained` is the share of the sum of squared differences that is gone, `exact` whether the rest is rounding.
    """

    name: str
    rows: int
    explained: float
    left: float
    exact: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """The largest difference of the scores of a server for one form of requests, and the one that rounding explains.

    `rows` have both scores; `refused` says why others have none. If the scores differ, `causes` are what was tested,
    the best first.
    """

    form: str
    rows: int
    difference: float
    allowed: float
    correlation: float
    causes: tuple[Cause, ...]
    refused: tuple[str, ...]

    @property
    def cause(self) -> Cause | None:
        """The cause that explains the difference, or None."""
        best = next(iter(self.causes), None)
        return best if best and (best.exact or best.explained >= LEAST_EXPLAINED) else None


def system(content: str) -> Message:
    """Return a system message."""
    return {"role": "system", "content": content}


def probe_rows(source: str | None) -> list[Conversation]:
    """Return the first conversations of a source, or short and long ones, with system messages and several turns."""
    if source is not None:
        found = (row_to_score(row, where, k).conversations for k, (where, row) in enumerate(rows_of(source, "rows")))
        return [each for row in found for each in row][:MOST_ROWS]
    pairs, rows = read_pairs(SHIPPED), list[Conversation]()
    for k, pair in enumerate(pairs):
        before = [system("Answer in one short sentence.")] * (k % 2) + [*pairs[k - 1][0]] * (k % 4 > 1)
        rows += [[*before, *each] for each in pair]
    text = " ".join(f"{n}. {pairs[n % 8][n // 8 % 2][-1]['content']}" for n in range(400))
    return rows + [[pairs[0][0][0], {"role": "assistant", "content": text[: int(150 * 1.25**n)]}] for n in range(19)]


def texts_with_faults(renderer: Renderer, chat: Sequence[Any], ids: Ids) -> dict[str, Ids]:
    """Return the token ids of a conversation with each fault of its text."""
    lead, rest = (chat[:1], chat[1:]) if chat[0]["role"] == "system" else ([], chat)
    edits = {"system messages are not read": rest, "only the last question and its reply are read": chat[-2:]}
    edits |= {f"the system prompt {text!r} is added": [*(lead or [system(text)]), *rest] for text in PROMPTS}
    written = zip(edits, renderer.encode([*edits.values()]), strict=True)
    found = {name: each.input_ids.tolist() for name, each in written if isinstance(each, Rendered)}
    texts = ["".join(map(markup.format_map, chat)) for markup in MARKUP.values()]
    found |= {name: each.tolist() for name, each in zip(MARKUP, renderer.tokenize(texts), strict=True)}
    tokens = (renderer.tokenizer.bos_token_id, renderer.tokenizer.eos_token_id)
    bos, eos = ([] if each is None else [each] for each in tokens)
    end = len(ids) - ids[::-1].index(*eos) if {*eos} & {*ids} else len(ids)
    return found | {
        "a generation prompt follows": renderer.message_ids(chat, add_generation_prompt=True).tolist(),
        "the first token (BOS) is missing": ids[1:],
        f"a BOS is {'doubled' if ids[:1] == bos else 'added'}": [*bos, *ids],
        "an EOS is added or doubled": [*ids, *eos],
        "the last EOS is missing": ids[: end - len(eos)],
        "what follows the last EOS is missing": ids[:end],
        "the last token is missing": ids[:-1],
        "the first token is read, not the last": ids[:1],
    }


class ServedScores:
    """Compares servers with a model in this process, in float32.

    Args:
        model: folder or hub id of a reward model.
        conversations: what is scored; those that the model cannot score are left out.
        others: other models that a server may have, such as earlier checkpoints.
        **options: further options of `load_reward_model`.

    Raises:
        ConfigError: this is no reward model that reads whole texts, or it can score none of the conversations.

    Example:
        >>> probe = ServedScores(None, probe_rows(None))
        >>> [each.cause for each in probe.compare(AskedServer("http://127.0.0.1:8000"))]  # doctest: +SKIP
    """

    def __init__(self, model: Any, conversations: Sequence[Conversation], others: Any = (), **options: Any) -> None:
        self._load = lambda path, **more: load_reward_model(path, **{"dtype": "float32", **options, **more})
        self._model, self._others, self.scorer = model, others, self._load(model)
        self.stored = open_checkpoint(split_options({"path": model, **options})[0]).stored_dtypes.most_common(1)
        scores, renderer = _scores(self.scorer.score, conversations), self.scorer.renderer
        (rows,) = np.isfinite(scores.rewards).nonzero()
        if not len(rows) or self.scorer.kind.input_format.mark_reply:
            raise ConfigError(f"{self.scorer!r} scores no whole texts, or none of these: {scores.errors[:1]}.")
        self._scores, self._ours, self._chats = (
            scores.take(rows),
            scores.rewards[rows],
            [conversations[k] for k in rows],
        )
        self._ids = [each.input_ids.tolist() for each in renderer.encode(self._chats) if isinstance(each, Rendered)]
        texts = [(renderer.text(each), renderer.text(each[:-1], add_generation_prompt=True)) for each in self._chats]
        chats = dict.fromkeys(("conversations", "messages"), self._chats)
        self._rows: Mapping[str, Sequence[Any]] = {**chats, "token ids": self._ids, "texts": texts}
        self._of_texts: dict[str, RewardArray] = {}

    def compare(self, server: AskedServer) -> Iterator[Comparison]:
        """Yield a comparison for each form of requests, of rows alone, and of all in one request if that differs."""
        for form in server.forms:
            asked = [server.ask(form, [each]) for each in self._rows[form]]
            alone = np.concatenate([rewards for rewards, _ in asked])
            yield self._compare(form, alone, [why for _, why in asked if why], self._causes(server, form, alone))
            (known,) = np.isfinite(alone).nonzero()
            if form != "messages" and len(known):
                together = alone.copy()
                together[known], why = server.ask(form, [self._rows[form][k] for k in known])
                if why or np.abs(together - alone)[known].max() > ROUNDING * np.abs(alone[known]).max():
                    yield self._compare(f"{form}, all in one request", together, [why] * bool(why), self._padded(alone))

    def _compare(self, form: str, served: RewardArray, refused: Sequence[Any], predictions: Predictions) -> Comparison:
        """Return a comparison, with the predictions as its causes if the scores differ."""
        known = np.isfinite(served)
        if not known.any():
            return Comparison(form, 0, np.inf, 0.0, np.nan, (), (*refused,))
        ours, theirs = self._ours[known], served[known]
        difference, allowed = float(np.abs(theirs - ours).max()), ROUNDING * float(np.abs(ours).max())
        correlation = float(np.corrcoef(ours, theirs)[0, 1]) if min(ours.std(), theirs.std()) > 0 else np.nan
        causes: list[Cause] = []
        for name, scores in predictions if difference > allowed else ():
            predicted = np.where(np.isfinite(scores), scores, self._ours)[known]
            left, rows = np.abs(theirs - predicted), int((np.abs(predicted - ours) > allowed).sum())
            explained = max(0.0, 1 - float((left**2).sum() / ((theirs - ours) ** 2).sum()))
            exact = bool(left.max() <= ROUNDING * np.abs(predicted).max())
            causes.append(Cause(name, rows, explained, float(left.max()), exact))
        causes.sort(key=lambda each: (not each.exact, 0.0 if each.exact else -each.explained))
        found = Comparison(form, len(ours), difference, allowed, correlation, tuple(causes), (*refused,))
        return self._rounded(found, served) if causes and found.cause is None else found

    def _rounded(self, found: Comparison, served: RewardArray) -> Comparison:
        """Add the cause that the server computes in 16 bits, if the differences have the size of its rounding."""
        known = np.isfinite(served)
        if (size := (served - self._ours)[known].std()) > 0.3 * self._ours.std():
            return found
        for dtype in ("bfloat16", "float16"):
            rounded = _scores(self._load(self._model, dtype=dtype, check=False).score, self._chats).rewards
            error = np.abs(rounded - self._ours)[known]
            if 0.35 < size / (rounded - self._ours)[known].std() < 2.8:
                name, own = f"precision: {dtype}", dtype == str(self.stored[0][0]).removeprefix("torch.")
                cause = Cause(
                    f"{name}, whose rounding is {error.max():.2g} here", len(error), 0.0, found.difference, True
                )
                allowed = 4 * float(error.max()) if own else found.allowed
                return dataclasses.replace(found, allowed=allowed, causes=(cause, *found.causes))
        return found

    def _causes(self, server: AskedServer, form: Form, served: RewardArray) -> Predictions:
        """Yield the scores with each fault, those that explain more than one fault last."""
        if not self._of_texts:
            texts = [texts_with_faults(self.scorer.renderer, *row) for row in zip(self._chats, self._ids, strict=True)]
            names = list(dict.fromkeys(name for row in texts for name in row))
            flat = [row.get(name, ids) for name in names for row, ids in zip(texts, self._ids, strict=True)]
            self._of_texts = dict(zip(names, self._rewards(flat).reshape(len(names), -1), strict=True))
        yield from self._of_texts.items()
        yield from self._cuts(served)
        for name, scores in {"": self._ours, **self._of_texts}.items():
            yield f"{name}{' and ' * bool(name)}a sigmoid is applied", 1 / (1 + np.exp(-scores))
        yield "a softmax is applied to one value", np.ones_like(self._ours)
        labels = self._scores.components
        shares = np.exp([each - max(labels.values()) for each in labels.values()])
        for name, scores, share in zip(labels, labels.values(), shares / shares.sum(axis=0), strict=True):
            yield from ((f"it is the label {name!r}", scores), (f"it is the softmax of the label {name!r}", share))
        yield "the sign is turned", -self._ours
        known = np.isfinite(served)
        slope, constant = np.polyfit(self._ours[known], served[known], 1)
        yield f"a linear map of the scores, {slope:.4g} x {constant:+.4g}", slope * self._ours + constant
        for other in self._others:
            yield f"the weights of {other}", _scores(self._load(other).score, self._chats).rewards
        told = [server.token_ids(form, row) for row in self._rows[form]] if form != "token ids" else []
        if told and all(told):
            differ = next((pair for pair in zip(told, self._ids, strict=True) if pair[0] != pair[1]), None)
            yield f"the server says that it reads other token ids, {differ}", self._rewards(told)

    def _cuts(self, served: RewardArray) -> Predictions:
        """Yield the scores of texts that are cut at the length that explains the shortest one with another score."""
        off, lengths = np.abs(served - self._ours), np.array([*map(len, self._ids)])
        wrong = off > max(ROUNDING * np.abs(self._ours).max(), 0.05 * np.nanmax(off))
        row = min(np.flatnonzero(wrong), key=lengths.__getitem__)
        least, most = max(lengths[~wrong & (lengths < lengths[row])], default=1), int(lengths[row])
        tried = sorted(
            {*range(least, most, 1 + (most - least) // 64), *(k for k in range(least, most) if not (k % 50 and k % 64))}
        )
        for side, cut in (("left", lambda ids, length: ids[-length:]), ("right", lambda ids, length: ids[:length])):
            scores = self._rewards([cut(self._ids[row], length) for length in tried])
            length = tried[int(np.nanargmin(np.abs(scores - served[row])))]
            yield (
                f"texts are cut on the {side}, to {length} tokens",
                self._rewards([cut(ids, length) for ids in self._ids]),
            )

    def _padded(self, alone: RewardArray) -> Predictions:
        """Yield the scores of rows that the server gets alone, and of rows whose padding is read."""
        yield "padding: a score depends on the rows beside it", alone
        pad, longest = self.scorer.renderer.tokenizer.pad_token_id or 0, max(map(len, self._ids))
        yield "padding is read on the left", self._rewards([[pad] * (longest - len(ids)) + ids for ids in self._ids])
        yield "padding is read on the right", self._rewards([ids + [pad] * (longest - len(ids)) for ids in self._ids])

    def _rewards(self, texts: Sequence[Ids]) -> RewardArray:
        return _scores(self.scorer.score_texts, texts).rewards


def _scores(score: Callable[[Any], Scores], rows: Sequence[Any]) -> Scores:
    try:
        return score(rows)
    except ScoringError as error:
        return error.scores
