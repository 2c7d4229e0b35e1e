"""Whether the words around an answer deny it or name another one: `not 5`, `5 or 6`, `5 is wrong`, `ikke 5`."""

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
    r"|refuses?|differs? from|different from"
    # other languages
    r"|no(?= (?:es|son|era|fue|hay)\b)|nicht|keine?|niet|geen|non(?= (?:è|sono)\b)|pas|não|nu(?= (?:este|e)\b)"
    r"|ikk[ej]\w?|inte|ekki|bukan(?:lah)?|tidak|nie|nem|není|nejsou|ei|nije|δεν|ليست?|لا|غير|לא|אינ[והם]\w?|не|ні"
)
_BETWEEN = (  # from a denial to the answer
    r"be|been|is|are|was|were|would|it['’]s|it|this|that|the|an?|worth|for|to|if|whether|say|think|believe|claim"
    r"|conclude|assume"
    rf"|true that|certain|sure|convinced|confident|just|even|quite|close|equals?|exactly|[^\W\d_]+ly"
    rf"|(?:(?:correct|right|final) )?{_THING}:?"
    r"|es|son|est|ist|sono|è|é|este|ole|jest|lik|lig|gleich|igual a|sama dengan|είναι|يساوي|равно|равен"
    r"|[a-z] ?=|boxed|text|textbf|mathrm"
)
_CHANGED = (  # directly before the answer
    r"(?:more|less|fewer|greater|larger|smaller|bigger|lower|higher) than|at (?:least|most)|up to|under|below|above"
    r"|between(?: \S{1,20} and)?|minus|negative|plus|times|twice|double|triple|thrice|exceeds?"
    r"|elfu|laki|[mb]ilioni|or"
    r"|(?:half|third|quarter|square|cube|root|factorial|inverse|reciprocal|opposite|percent|logarithm|%)(?: of)?"
    r"|\d (?:hours?|minutes?|weeks?|days?|feet|foot|yards?|pounds?|dollars?|euros?|m|km|kg|h|ft|lb)(?:,? and)?"
)
_GAP = r"[\s*_`\"'“‘$(\[{\\]"
_BEFORE = re.compile(
    rf"(?:(?:\b(?:{_NOT})|n['’]t)(?:{_GAP}++(?:(?:{_BETWEEN})(?!\w)))*+|\b(?:{_CHANGED})(?:{_GAP}++(?:the|an?)\b)?"
    rf"|[不非](?:是|等于|等於)?|không (?:phải|bằng)(?: là)?|ไม่(?:ใช่|เท่ากับ)?|≠|\\neq?){_GAP}*+\Z",
    re.IGNORECASE,
)
_WRONG = r"(?:wrong|incorrect|false|untrue|mistaken|invalid|impossible|too (?:big|large|small|low|high|many|much))\b"
_AFTER = re.compile(
    r"[\s*_`\"'”’$)\]}\\]*+(?:\?|or\b[\s$(\\]*+(?:-?\d|[A-J]\b)|[,(—–-]?[ ]?(?:(?:which|but|though|and|no),? )?"
    r"(?:(?:this|that|it|the answer) )?(?:(?!because|since|as\b|for\b|if\b|while|when|so\b)[a-z]{2,} )?(?:"
    rf"(?:(?:is|are|was|were|seems|looks|would be|must be) )?(?:[a-z]+ly |just |quite |an? )*{_WRONG}"
    r"|(?:is|was)(?: [a-z]+ly)?(?: not| never|n['’]t)\b|(?:is|was)n['’]t\b"
    r"|(?:cannot|(?:can|could|would|will|does|must) not|(?:ca|could|would|wo|does)n['’]t) (?:[a-z]+ly )?"
    r"(?:be|equal|work|satisfy)\b)"
    # other languages, in many of which a unit may stand before the denial
    r"|[^\W\d_]{0,3}?\s?(?:では?(?:な|あり)|じゃ(?:な|あり)|[가이은는]?\s?아[니닙닌]|değil|नहीं|نہیں|نیست|নয়|அல்ல|కాదు|അല്ല"
    r"|ಅಲ್ಲ|ਨਹੀਂ|નથી|不对|不對|错|錯))",
    re.IGNORECASE,
)
_LISTED = re.compile(  # frequent words of languages whose denials are listed
    r"\b(?:the|is|are|was|we|i|you|s?he|they|so|it|of|to|and|this|that|there|have|has|had|in|at|for|with|from|on|as|be|or"
    r"|per ?cent|about|approximately|roughly|exactly|therefore|thus|hence|then|answer|total|gets?|costs?|no|not|final"
    r"|pays?|paid|makes?|made|needs?|takes?|earns?|spends?|left|dollars|cents|hours|minutes|days|each|every|per|more|than"
    r"|since|because|by|after|if|let|der|das|ist|sind|und|also|wir|kostet|les?|la|est|donc|ainsi|elle|il|nous|el|los|son"
    r"|es|por|hay|sono|quindi|è|os|são|é|het|een|zijn|dus|det|är|er|jest|это|то|равно|ответ)\b|[一-鿿ぁ-ヿ가-힣]",
    re.IGNORECASE,
)


def is_denied(text: str, start: int, end: int) -> bool:
    """Return whether the words around `text[start:end]` deny it, name another answer too, or change its value."""
    before = text[max(0, start - MARGIN) : start]
    return _BEFORE.search(before) is not None or _AFTER.match(text[end : end + MARGIN]) is not None


def is_listed(sentence: str) -> bool:
    """Return whether a sentence has no words, or is in a language whose denials this file knows."""
    return re.search(r"[^\W\d_]{2}", sentence) is None or _LISTED.search(sentence) is not None
