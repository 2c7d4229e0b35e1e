"""Options of a judge, and what follows from them."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import pydantic

from gym_rm.config import Finite, Flag, NonNegativeInt, PositiveInt
from gym_rm.engine.text.judged import Judged, JudgedOptions

OURS = "fenced"
Mode: TypeAlias = Literal["score", "pairwise", "listwise", "rubric"]
Comparisons: TypeAlias = Literal["all_pairs", "circular", "reference"]


class JudgeOptions(JudgedOptions):
    """Options of `kind="judge"`, besides those of the chat model."""

    style: str = OURS
    """The form of the questions: of ours for any chat model, of a public generative reward model (`"genrm"`,
    `"prometheus"`, `"rm-r1"`, ...) as it was trained on, or a YAML file of such a form."""
    rubric: Any = None
    """What a good reply is: a text, or for `mode="rubric"` a list of `{criterion, weight}`. None for criteria that fit
    any task, or those of the data row."""
    mode: Mode | None = None
    """`score` grades each reply, `pairwise` compares it with others, `listwise` grades a group in one question,
    `rubric` decides each criterion of a rubric. None for what fits the other options."""
    scale: tuple[Finite, Finite] | None = None
    """Lowest and highest score; None for (1, 10), or by probabilities (1, 9). Most styles have a scale of their own."""
    comparisons: Comparisons | None = None
    """What `pairwise` compares a reply with: the text in `prompt.metadata["reference_reply"]` (`reference`), or the
    other replies to the same prompt in the call: `all_pairs` (N (N - 1) questions for N replies) or `circular` (N).
    None for the reference, or with a style for all pairs."""
    principle: str | None = None
    """What a style judges by, if it takes a principle; the field `principle` of a data row comes first."""
    reference: Flag = True
    """Whether the judge sees `prompt.answer`, where a row has one, as the reference answer."""
    judged: Judged = "answer"
    """`"answer"` shows the judge replies without their thinking, `"all"` with it. With `unfinished=`, the only answer
    of a group is compared with itself."""
    samples: PositiveInt = 1
    """Number of verdicts per question; the reward is their mean. More than 1 needs a temperature."""
    marked: Flag = True
    """Whether the judge must write the mark of the question beside its verdict. Without, a verdict that it copies from
    a reply can pass for its own."""
    verdict: Literal["written", "probabilities"] = "written"
    """`"probabilities"` takes the mean of the verdicts by their probabilities as the answer, without reasons: one
    forward, or one request with `logprobs`. For small judges, which write no clear verdict."""
    min_mass: Finite = pydantic.Field(default=0.1, ge=0, le=1)
    """Least probability of all verdicts together; a question below it has no verdict."""
    timeout: Finite = pydantic.Field(default=300.0, gt=0)
    """Seconds for a call of `score`; rows without a verdict by then are errors."""
    max_retries: NonNegativeInt = 3
    """How often an answer without a clear verdict is asked for again, and a failed request to a server sent again. A
    style at temperature 0 would answer the same again, so it is asked once."""

    @pydantic.model_validator(mode="after")
    def _require_consistent(self) -> JudgeOptions:
        if self.scale is not None and self.scale[0] >= self.scale[1]:
            raise ValueError(f"scale must be (lowest, highest), got {self.scale}")
        decides = self.verdict == "probabilities"
        if decides and any(end % 1 for end in self.scale or ()):
            raise ValueError(f"scale must have whole ends with verdict='probabilities', got {self.scale}")
        others = {"samples", "marked"} if decides else {"min_mass"}
        if given := sorted(others & self.model_fields_set):
            raise ValueError(f"{given} have no effect with verdict={self.verdict!r}")
        return self
