"""Whether the words around an answer deny it or name another one: `not 5`, `5 or 6`, `5 is wrong`."""

from __future__ import annotations

import re

MARGIN = 120
"""Characters before and after an answer that are read."""

_THING = r"(?:answer|result|value|solution|option|choice|letter|number)"
_NOT = (
    r"not|never|cannot|nor|neither|hardly|scarcely|(?<!no )(?<!without a )doubt(?:s|ed|ful)?|unlikely|impossible"
    r"|mistake|no way"
    r"|(?:any(?:thing|where)|every(?:thing)?|nothing|nowhere|all|none|no one) (?:but|near)|by no means"
    r"|except|excluding|besides|apart from|rather than|instead of|other than|in place of|as opposed to|far from"
    rf"|(?:wrong|incorrect|false|mistaken)(?= (?:that|to|{_THING}))|nobody|no circumstances|rul(?:e|es|ed|ing) out"
    r"|refuses?|differs? from|different from|no es|nicht|niet|non è|não é|n['’]est pas|не"
)
_BETWEEN = (  # from a denial to the answer
    r"be|been|is|are|was|were|would|it['’]s|it|this|that|the|an?|worth|for|to|if|whether|say|think|believe|claim|conclude|assume"
    rf"|true that|certain|sure|convinced|confident|just|even|quite|close|equals?|exactly|[^\W\d_]+ly"
    rf"|(?:(?:correct|right|final) )?{_THING}:?"
    r"|[a-z] ?=|boxed|text|textbf|mathrm"
)
_CHANGED = (  # directly before the answer
    r"(?:more|less|fewer|greater|larger|smaller|bigger|lower|higher) than|at (?:least|most)|up to|under|below|above"
    r"|between(?: \S{1,20} and)?|minus|negative|plus|times|twice|double|triple|thrice|exceeds?"
    r"|(?:half|third|quarter|square|cube|root|factorial|inverse|reciprocal|opposite|percent|logarithm|%)(?: of)?|or"
)
_GAP = r"[\s*_`\"'“‘$(\[{\\]"
_BEFORE = re.compile(
    rf"(?:(?:\b(?:{_NOT})|n['’]t)(?:{_GAP}++(?:(?:{_BETWEEN})(?!\w)))*+|\b(?:{_CHANGED})(?:{_GAP}++(?:the|an?)\b)?"
    rf"|不是|≠|\\neq?){_GAP}*+\Z",
    re.IGNORECASE,
)
_WRONG = r"(?:wrong|incorrect|false|untrue|mistaken|invalid|impossible|too (?:big|large|small|low|high|many|much))\b"
_AFTER = re.compile(
    r"[\s*_`\"'”’$)\]}\\]*+(?:\?|or\b[\s$(\\]*+(?:-?\d|[A-J]\b)|[,(—–-]?[ ]?(?:(?:which|but|though|and|no),? )?"
    r"(?:(?:this|that|it|the answer) )?(?:(?!because|since|as\b|for\b|if\b|while|when|so\b)[a-z]{2,} )?(?:"
    rf"(?:(?:is|are|was|were|seems|looks|would be|must be) )?(?:[a-z]+ly |just |quite |an? )*{_WRONG}"
    r"|(?:is|was)(?: [a-z]+ly)?(?: not| never|n['’]t)\b|(?:is|was)n['’]t\b"
    r"|(?:cannot|(?:can|could|would|will|does|must) not|(?:ca|could|would|wo|does)n['’]t) (?:[a-z]+ly )?"
    r"(?:be|equal|work|satisfy)\b))",
    re.IGNORECASE,
)


def is_denied(text: str, start: int, end: int) -> bool:
    """Return whether the words around `text[start:end]` deny it, name another answer too, or change its value."""
    before = text[max(0, start - MARGIN) : start]
    return _BEFORE.search(before) is not None or _AFTER.match(text[end : end + MARGIN]) is not None
