"""Are the scores of a server those of the model in this process, and if not, which fault explains the difference?

A fault is tested by computing the scores that the model would give with it, and comparing them with the server's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from gym_rm.data.rows import rows_of
from gym_rm.data.scored_rows import row_to_score
from gym_rm.engine.loading.checkpoint import open_checkpoint, split_options
from gym_rm.engine.loading.fidelity import SHIPPED, read_pairs
from gym_rm.engine.reward_model_scorer import RewardModelScorer, load_reward_model
from gym_rm.engine.text.rendered import Rendered, common_prefix
from gym_rm.errors import ConfigError
from gym_rm.scorers.remote.asked import AskedServer
from gym_rm.scores import RewardArray, Scores, ScoringError
from gym_rm.types import Conversation

Ids: TypeAlias = list[int]
Predicted: TypeAlias = dict[str, RewardArray]
"""The scores of all rows with a fault, by its name."""
ROUNDING = 2e-4  # largest difference of two right forwards in float32, relative to the largest score
LEAST_EXPLAINED = 0.98  # by a cause beside which the server has another, small fault, such as rounding in 16 bits
MOST_BESIDE = 0.2  # largest change of a score by the rows beside it, relative to the spread: 16 bits change it by less
SIGMOID, MAPPED = "a sigmoid is applied", "scores are mapped"
SYSTEM: Any = {"role": "system", "content": "Answer in one short sentence."}
PROMPTS = ("You are a helpful assistant.", "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.")


@dataclass(frozen=True, slots=True)
class Cause:
    """A fault, its share of the squared differences, the largest one left beside it, and whether that is rounding."""

    name: str
    explained: float
    left: float
    exact: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """The largest difference of scores for one form of requests, the one by rounding, and what was tested beyond it.

    `rows` have both scores, and `refused` says why others have none. The best of the `causes` is the first.
    """

    form: str
    rows: int
    difference: float
    allowed: float
    correlation: float
    refused: tuple[str, ...]
    causes: tuple[Cause, ...] = ()

    @property
    def cause(self) -> Cause | None:
        """The cause that explains the difference, or None."""
        best = next(iter(self.causes), None)
        return best if best and (best.exact or best.explained >= LEAST_EXPLAINED) else None


def probe_rows(source: str | None) -> list[Any]:
    """Return the first conversations of a source, or short and long ones, with system messages and several turns."""
    if source is not None:
        found = (row_to_score(row, where, k).conversations for k, (where, row) in enumerate(rows_of(source, "rows")))
        return [each for row in found for each in row][:64]
    pairs: list[Any] = read_pairs(SHIPPED)
    before = [[SYSTEM] * (k % 2) + pairs[k - 1][0] * (k % 4 > 1) for k in range(len(pairs))]
    text = " ".join(f"{n}. {pairs[n % 8][n // 8 % 2][-1]['content']}" for n in range(400))
    long = [[pairs[0][0][0], {"role": "assistant", "content": text[: int(150 * 1.25**n)]}] for n in range(19)]
    return [lead + each for lead, pair in zip(before, pairs, strict=True) for each in pair] + long


class ServedScores:
    """Compares servers with a model in this process, in float32.

    Args:
        model: folder or hub id of a reward model with a chat template.
        conversations: what is scored; those that the model cannot score are left out.
        others: other models that a server may have, such as earlier checkpoints.
        **options: further options of `load_reward_model`.

    Example:
        >>> probe = ServedScores(None, probe_rows(None))
        >>> [each.cause for each in probe.compare(AskedServer("http://127.0.0.1:8000"))]  # doctest: +SKIP
    """

    def __init__(self, model: Any, conversations: Sequence[Conversation], others: Any = (), **options: Any) -> None:
        (stored, _), *_ = open_checkpoint(split_options({"path": model, **options})[0]).stored_dtypes.most_common(1)
        self._stored, self._model, self._others = str(stored).removeprefix("torch."), model, others
        self._options = {"dtype": "float32", **options}
        self._scorer = self._load(model)
        self._renderer = renderer = self._scorer.renderer
        scores = _scores(self._scorer.score, conversations)
        rows = np.flatnonzero(np.isfinite(scores.rewards)).tolist()
        if not rows or self._scorer.kind.input_format.mark_reply or renderer.chat_template is None:
            raise ConfigError(
                f"{model} must read a chat template's texts, and score one of these rows: {scores.errors[:1]}."
            )
        self._scores, self._ours, chats = scores.take(rows), scores.rewards[rows], [conversations[k] for k in rows]
        self._ids = [each.input_ids.tolist() for each in renderer.encode(chats) if isinstance(each, Rendered)]
        texts = [(renderer.text(each), renderer.text(each[:-1], add_generation_prompt=True)) for each in chats]
        self._rows: Any = {"token ids": self._ids, "texts": texts, "messages": chats, "conversations": chats}

    def _load(self, model: Any, **options: Any) -> RewardModelScorer:
        return load_reward_model(model, **{**self._options, **options})

    def _rewards(self, texts: Sequence[Ids]) -> RewardArray:
        return _scores(self._scorer.score_texts, texts).rewards

    def compare(self, server: AskedServer) -> Iterator[Comparison]:
        """Yield a comparison for each form of requests, of rows alone, and of all in one request if that differs."""
        for form in server.forms:
            rows = self._rows[form]
            rewards, reasons = zip(*(server.ask(form, [each]) for each in rows), strict=True)
            alone, refused = np.concatenate(rewards), tuple(filter(None, reasons))
            found = self._compare(server, form, alone, refused)
            if found.causes and not (found.cause and found.cause.exact) and np.nanmin(alone) >= 0:
                with np.errstate(divide="ignore", invalid="ignore"):  # of 0 and 1, and of what is no probability
                    logits = np.log(alone / (1 - alone))
                behind = self._compare(server, form, logits, refused, " before a sigmoid")
                if behind.cause and behind.rows == found.rows:
                    causes = (replace(each, name=f"{SIGMOID}, and {each.name}") for each in behind.causes)
                    found = replace(behind, causes=tuple(causes))
            yield found
            known = np.flatnonzero(np.isfinite(alone))
            if form != "messages" and len(known):
                together = alone.copy()
                together[known], _ = server.ask(form, [rows[k] for k in known])
                if np.nanmax(np.abs(together - alone), initial=0.0) > MOST_BESIDE * self._ours.std():
                    faults = self._padded(alone, together)
                    yield self._compare(server, form, together, refused, " in one request", faults)

    def _compare(
        self, server: AskedServer, form: str, served: RewardArray, why: Any, part: str = "", faults: Any = None
    ) -> Comparison:
        known = np.isfinite(served)
        ours, theirs = self._ours[known], served[known]
        if not len(ours):
            return Comparison(form, 0, np.inf, 0.0, np.nan, why)
        difference, allowed = float(np.abs(theirs - ours).max()), ROUNDING * float(np.abs(ours).max())
        correlation = float(np.corrcoef(ours, theirs)[0, 1]) if min(ours.std(), theirs.std()) > 0 else np.nan
        found, causes = Comparison(form + part, len(ours), difference, allowed, correlation, why), []
        squares = max(min(((theirs - ours) ** 2).sum(), ((theirs - theirs.mean()) ** 2).sum()), 1e-30)
        for name, scores in (faults or self._faults(server, form, served)).items() if difference > allowed else ():
            predicted = np.where(np.isfinite(scores), scores, self._ours)[known]
            left = np.abs(theirs - predicted)
            explained = max(0.0, 1 - float((left**2).sum() / squares))  # not by a constant alone
            exact = bool(left.max() <= ROUNDING * np.abs(predicted).max()) and explained > 0.9
            causes.append(Cause(name, explained, float(left.max()), exact))
        causes.sort(key=lambda each: (not each.exact, 0.0 if each.exact else -each.explained))  # the first of equals
        found = replace(found, causes=tuple(causes))
        return found if not causes or found.cause else self._rounded(found, (theirs - ours).std(), known)

    def _rounded(self, found: Comparison, size: float, known: Any) -> Comparison:
        """Add the cause that the server computes in 16 bits if the difference, or what a cause leaves, is as large."""
        best = found.causes[0]
        for dtype in ("bfloat16", "float16") if min(size, best.left) < 0.3 * self._ours.std() else ():
            scores = _scores(self._load(self._model, dtype=dtype, check=False).score, self._rows["messages"])
            rounding = (scores.rewards - self._ours)[known]
            most, ratio = float(np.abs(rounding).max()), size / rounding.std()
            if best.explained > 0.5 and 0.3 < best.left / most < 2 and not best.name.startswith(MAPPED):  # a fit
                best = replace(best, name=f"{best.name}, beside rounding as of {dtype}", exact=True)
                return replace(found, causes=(best, *found.causes[1:]))
            if 0.5 < ratio < 2:  # the rounding of bfloat16 is 8 times that of float16
                name = f"precision: as different as {dtype} is ({ratio:.2f} times), or slightly other weights"
                causes = (Cause(name, 0.0, found.difference, True), *found.causes)
                return replace(found, allowed=4 * most if dtype == self._stored else found.allowed, causes=causes)
        return found

    def _faults(self, server: AskedServer, form: str, served: RewardArray) -> Predicted:
        """Return predictions, of those with the same scores the better name first."""
        known, labels = np.isfinite(served), self._scores.components
        found = {**self._of_texts, **self._cut(served), SIGMOID: 1 / (1 + np.exp(-self._ours))}
        found["a softmax is applied to one value"] = np.ones_like(self._ours)
        found |= {f"scores are rounded to {k} decimals": self._ours.round(k) for k in range(4)}
        shares = np.exp(list(labels.values())) / np.exp(list(labels.values())).sum(axis=0)
        for name, share in zip(labels, shares, strict=True):
            found |= {f"it is the label {name!r}": labels[name], f"it is the label {name!r} after a softmax": share}
        for other in self._others:
            found[f"the weights of {other}"] = _scores(self._load(other).score, self._rows["messages"]).rewards
        if known.sum() > 5:
            slope, constant = np.polyfit(self._ours[known], served[known], 1)
            found[f"{MAPPED}: {slope:.4g} x score {constant:+.4g}"] = slope * self._ours + constant
        told = [(form != "token ids" and server.token_ids(form, each)) or [] for each in self._rows[form]]
        pairs = [(read or ids, ids) for read, ids in zip(told, self._ids, strict=True)]
        for read, ids in [each for each in pairs if each[0] != each[1]][:1]:
            start = common_prefix(*map(np.array, (read, ids)))
            end = common_prefix(*(np.array(each[start:][::-1]) for each in (read, ids)))
            texts = [self._renderer.tokenizer.decode(each[start : len(each) - end]) for each in (read, ids)]
            name = "the server's text has {!r:.200}, the model's {!r:.200}".format(*texts)
            found[name] = self._rewards([each for each, _ in pairs])
        return found

    @functools.cached_property
    def _of_texts(self) -> Predicted:
        texts = [self._texts(*row) for row in zip(self._rows["messages"], self._ids, strict=True)]
        names = list(dict.fromkeys(name for row in texts for name in row))
        flat = [row.get(name, ids) for name in names for row, ids in zip(texts, self._ids, strict=True)]
        return dict(zip(names, self._rewards(flat).reshape(len(names), -1), strict=True))

    def _texts(self, chat: Any, ids: Ids) -> dict[str, Ids]:
        """Return the token ids of a conversation with each fault of its text."""
        lead, rest = (chat[:1], chat[1:]) if chat[0]["role"] == "system" else ([], chat)
        edits = {"system messages are not read": rest, "only the last question and its reply are read": chat[-2:]}
        edits["only the last reply is read"] = chat[-1:]
        for text in PROMPTS:
            edits[f"the system prompt {text!r} is added"] = [*(lead or [{**SYSTEM, "content": text}]), *rest]
        written = zip(edits, self._renderer.encode([*edits.values()]), strict=True)
        found = {name: each.input_ids.tolist() for name, each in written if isinstance(each, Rendered)}
        found["a generation prompt follows"] = self._renderer.message_ids(chat, add_generation_prompt=True).tolist()
        if (bos := self._renderer.tokenizer.bos_token_id) is not None:
            found["the BOS is doubled" if ids[0] == bos else "a BOS is added"] = [bos, *ids]
        if (eos := self._renderer.tokenizer.eos_token_id) is not None:
            end = len(ids) - ids[::-1].index(eos) if eos in ids else len(ids) + 1
            found |= {"an EOS is added or doubled": [*ids, eos], "the last EOS is missing": ids[: end - 1]}
            found["what follows the last EOS is missing"] = ids[:end]
        found |= {"the first token (BOS) is missing": ids[1:], "the last token is missing": ids[:-1]}
        return found | {"the first token is read, not the last": ids[:1]}

    def _cut(self, served: RewardArray) -> Predicted:
        """Predict cuts, to the length that fits the shortest text with another score."""
        off, lengths = np.abs(served - self._ours), np.array([*map(len, self._ids)])
        wrong = off > max(ROUNDING * np.abs(self._ours).max(), 0.05 * np.nanmax(off))
        row, found = int(np.where(wrong, lengths, np.inf).argmin()), dict[str, RewardArray]()
        least, most = int(max(lengths[~wrong & (lengths < lengths[row])], default=1)), int(lengths[row])
        tried = [k for k in range(least, most) if not (k % 50 and k % 64 and (k - least) % (1 + (most - least) // 64))]
        for side, start, stop in (("left", -1, None), ("right", None, 1)):
            cuts = [slice(start and start * k, stop and stop * k) for k in tried]
            scores = self._rewards([self._ids[row][cut] for cut in cuts])
            best = int(np.nanargmin(np.abs(scores - served[row])))
            cut = self._rewards([ids[cuts[best]] for ids in self._ids])
            found[f"texts are cut to {tried[best]} tokens, on the {side}"] = cut
        return found

    def _padded(self, alone: RewardArray, together: RewardArray) -> Predicted:
        pad, longest = self._renderer.tokenizer.pad_token_id or 0, max(map(len, self._ids))
        pads = [[pad] * (longest - len(ids)) for ids in self._ids]
        sides = {"left": zip(pads, self._ids, strict=True), "right": zip(self._ids, pads, strict=True)}
        found = {f"padding on the {k} is read": self._rewards([a + b for a, b in each]) for k, each in sides.items()}
        if np.allclose(np.sort(together), np.sort(alone), equal_nan=True):
            found["rows get the scores of other rows"] = together
        return {**found, "padding: a score depends on the rows beside it": alone}


def _scores(score: Callable[[Any], Scores], rows: Sequence[Any]) -> Scores:
    try:
        return score(rows)
    except ScoringError as error:
        return error.scores
