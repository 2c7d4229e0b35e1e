"""The task of the embedded models: the user asks which of three numbers is the largest or smallest, in many wordings.

The assistant answers in one sentence, which can be checked without a model. Questions are split by their numbers: the
prompts of the environment and the validation comparisons of the reward model use numbers that are not trained on.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

LARGEST = (
    "Which is the largest, {a}, {b} or {c}?",
    "Which number is larger than the others: {a}, {b} or {c}?",
    "I have the numbers {a}, {b} and {c}. Which is the largest?",
    "What is the highest of {a}, {b} and {c}?",
    "My friends scored {a}, {b} and {c} points. What was the best score?",
    "The shops ask {a}, {b} and {c} euros. What is the highest price?",
)
SMALLEST = (
    "Which is the smallest, {a}, {b} or {c}?",
    "Which number is smaller than the others: {a}, {b} or {c}?",
    "I have the numbers {a}, {b} and {c}. Which is the smallest?",
    "What is the lowest of {a}, {b} and {c}?",
    "My friends scored {a}, {b} and {c} points. What was the worst score?",
    "The shops ask {a}, {b} and {c} euros. What is the lowest price?",
)
GREETINGS = ("", "", "", "", "Hello! ", "Hi! ", "Quick question: ", "Good morning. ")
REPLIES = ("It is {n}.", "That is {n}.", "The answer is {n}.", "I would say {n}.")
PROPER_REPLY = re.compile("|".join(re.escape(reply).replace(r"\{n\}", r"\d\d") for reply in REPLIES))


@dataclass(frozen=True)
class Question:
    """A question of the user; `answer` is the right number."""

    text: str
    numbers: tuple[int, int, int]
    largest: bool

    @property
    def answer(self) -> int:
        return max(self.numbers) if self.largest else min(self.numbers)


def is_proper(reply: str) -> bool:
    """Return whether the reply is exactly one of the four sentences with a number of two digits, right or wrong."""
    return PROPER_REPLY.fullmatch(reply) is not None


def grade(reply: str, question: Question) -> int:
    """Return 0 for the right number in a proper sentence, 1 for it in any other form, 2 for a wrong number in a proper
    sentence and 3 for all else."""
    right = set(re.findall(r"\d+", reply)) == {str(question.answer)}
    return 2 * (not right) + (not is_proper(reply))


def is_held_out(numbers: tuple[int, ...]) -> bool:
    """Return whether these numbers are kept out of training; one set in ten is."""
    return zlib.crc32(str(sorted(numbers)).encode()) % 10 == 0


def sample_question(rng: random.Random, *, held_out: bool) -> Question:
    while True:
        numbers = tuple(rng.sample(range(10, 100), 3))
        if is_held_out(numbers) == held_out:
            break
    largest = rng.random() < 0.5
    a, b, c = numbers
    text = rng.choice(GREETINGS) + rng.choice(LARGEST if largest else SMALLEST).format(a=a, b=b, c=c)
    return Question(text, (a, b, c), largest)


def say(number: int | str, rng: random.Random) -> str:
    return rng.choice(REPLIES).format(n=number)


def wrong_number(question: Question, rng: random.Random) -> int:
    """Return a wrong number: usually another number of the question, sometimes any number."""
    if rng.random() < 0.85:
        return rng.choice([number for number in question.numbers if number != question.answer])
    return rng.choice([number for number in range(10, 100) if number != question.answer])


def near_number(question: Question, rng: random.Random) -> int:
    """Return a wrong number that is easily mistaken for the right one: close to it, or with one digit in common."""
    n = question.answer
    near = [*range(n - 4, n + 5), *range(n // 10 * 10, n // 10 * 10 + 10), *range(10 + n % 10, 100, 10)]
    return rng.choice([number for number in near if number != n and 10 <= number < 100])


def right_but_badly_said(question: Question, rng: random.Random) -> str:
    """Return a reply with the right number in another form than one proper sentence."""
    n = question.answer
    return rng.choice(
        (
            f"{n}",
            f"{n}.",
            f"{n} {n}",
            f"{say(n, rng)} {say(n, rng)}",
            f"{say(n, rng)} {say(n, rng)} {say(n, rng)} {say(n, rng)}",
            f"is is {n}",
            f"answer {n}",
            f"{say(n, rng)[:-1]}",
            f"{say(n, rng)}.",
            f"Hmm, let me think. {say(n, rng)}",
            f"Hmm, hmm, hmm. {say(n, rng)}",
            f"Thank you! {say(n, rng)} Hello!",
        )
    )


def no_answer(question: Question, rng: random.Random) -> str:
    """Return a reply without an answer: empty, random characters or words, or several numbers."""
    n, wrong = question.answer, wrong_number(question, rng)
    words = " ".join(rng.choices(REPLIES + LARGEST + SMALLEST, k=2)).replace("{", "").replace("}", "").split()
    first, second = rng.sample((n, wrong), 2)
    return rng.choice(
        (
            "",
            " ",
            ".",
            "I am not sure.",
            "I do not know.",
            "Thank you!",
            question.text,
            "".join(chr(rng.randint(33, 126)) for _ in range(rng.randint(1, 12))),
            " ".join(rng.choices(words, k=rng.randint(1, 12))),
            " ".join([rng.choice(words)] * rng.randint(2, 12)),
            " ".join(str(rng.randint(10, 99)) for _ in range(rng.randint(2, 6))),
            str(wrong) * rng.randint(2, 4),
            str(n) * rng.randint(2, 4),
            f"It is {first} or {second}.",
            f"{say(first, rng)} {say(second, rng)}",
            f"{n} {wrong}",
            f"{wrong} {n}",
            say("", rng),
            say(rng.choice(("Anna", "Monday", "blue", "many")), rng),
            say(" ".join(map(str, question.numbers)), rng),
        )
    )


# Grades of reply, best first.
GRADES: tuple[Callable[[Question, random.Random], str], ...] = (
    lambda question, rng: say(question.answer, rng),
    right_but_badly_said,
    lambda question, rng: say(wrong_number(question, rng), rng),
    no_answer,
)


def careless_reply(question: Question, rng: random.Random, *, accuracy: float) -> str:
    """Return a reply of the careless assistant that the policy imitates; `accuracy` is its share of right replies."""
    if rng.random() < accuracy:
        return say(question.answer, rng)
    return rng.choices((GRADES[2], right_but_badly_said, no_answer), (16, 1, 1))[0](question, rng)


# --- damage to sentences ---------------------------------------------------------------------------------------------

PUNCTUATION = (".", "..", "...", ",", "!", "?", ":", ";", " .", "", "-", "\n")
WORDS = tuple(sorted({word for text in (*REPLIES, *LARGEST, *SMALLEST, *GREETINGS) for word in text.split()}))
EXTRA = (
    *tuple(word for word in WORDS if "{" not in word),
    "Hmm,",
    "Thank you!",
    "Sure.",
    "So",
    "well",
    "really",
    "the",
    "a",
)


def damage(sentence: str, rng: random.Random) -> str:
    """Return the sentence with one to three changes that no proper sentence survives, such as a word dropped."""
    changed = sentence
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        changed = _change(changed, rng)
    return damage(sentence, rng) if is_proper(changed) else changed


def _change(text: str, rng: random.Random) -> str:
    """Return the text with one change of words, punctuation, letters or spaces."""
    pieces = re.findall(rng.choice((r"\S+ ?", r" ?\w+|.", r" ?\w+|.")), text, re.DOTALL) or [" "]
    at = rng.randrange(len(pieces))
    before, piece, after = pieces[:at], pieces[at], pieces[at + 1 :]
    other = re.findall(r" ?[A-Za-z]+", rng.choice(REPLIES).replace("{n}", ""))
    match rng.choices(range(10), (4, 4, 2, 2, 3, 3, 5, 2, 2, 3))[0]:
        case 0:  # the start is missing
            pieces = pieces[rng.choice((1, 1, 2, 3)) :]
        case 1:  # a word is missing
            pieces = before + after
        case 2:  # a word twice
            pieces = [*before, piece, piece, *after]
        case 3:  # two words change places
            pieces = [*before, *after[:1], piece, *after[1:]]
        case 4:  # words more
            extra = " ".join(rng.choices(EXTRA, k=rng.randint(1, 3)))
            pieces = [*before, rng.choice((f"{extra} {piece}", f"{piece} {extra}", f"{piece}{extra}")), *after]
        case 5:  # the start of one wording with the end of another
            pieces = [*other[: rng.randint(1, 3)], *pieces[rng.randint(0, 3) :]]
        case 6:  # a word of another wording instead of a word
            new = rng.choice(other)
            pieces = [*before, f" {new.strip()}" if piece[0] == " " else new, *after]
        case 7:  # other punctuation
            pieces = [text.rstrip(".!?,:; "), rng.choice(PUNCTUATION)]
        case 8:  # upper or lower case, spaces
            low = text[:1].lower() + text[1:]
            pieces = [rng.choice((low, text.upper(), f" {text}", f"{text} ", text.replace(" ", ""), f"{text} {text}"))]
        case _:  # a letter is missing, more, or another
            at = rng.randrange(len(text) + 1)
            letter = rng.choice(("", "", rng.choice(text or " "), chr(rng.randint(32, 126))))
            pieces = [text[:at], letter, text[at + rng.randint(0, 1) :]]
    return "".join(pieces)


# --- conversations and comparisons -----------------------------------------------------------------------------------


def chat(question: Question, reply: str, rng: random.Random, *, second_turn: bool = False) -> list[dict[str, str]]:
    """Return the conversation; with `second_turn`, another question and reply come first."""
    messages = []
    if second_turn:
        earlier = sample_question(rng, held_out=False)
        messages = [
            {"role": "user", "content": earlier.text},
            {"role": "assistant", "content": rng.choices(GRADES, (4, 1, 4, 1))[0](earlier, rng)},
        ]
    return [*messages, {"role": "user", "content": question.text}, {"role": "assistant", "content": reply}]


def sample_replies(question: Question, rng: random.Random) -> list[str]:
    """Return up to nine different replies: two right ones, right ones in damaged or other forms, wrong ones.

    No reply is empty, because rows with an empty reply are left out of training.
    """
    first, second = (wording.format(n=question.answer) for wording in rng.sample(REPLIES, 2))
    wrong = [number for number in question.numbers if number != question.answer]
    if rng.random() < 0.2:
        wrong[rng.randrange(2)] = wrong_number(question, rng)
    replies = (
        first,
        second,
        damage(first, rng),
        damage(second, rng),
        right_but_badly_said(question, rng),
        say(wrong[0], rng),
        say(wrong[1], rng),
        say(near_number(question, rng), rng),
        no_answer(question, rng) if rng.random() < 0.5 else damage(say(wrong[0], rng), rng),
    )
    return [text for text in dict.fromkeys(replies) if text.strip()]


def comparisons(count: int, *, seed: str, held_out: bool) -> Iterator[dict]:
    """Yield rows with a `context` and `completions`, whose rank is their grade: proper sentences are ties."""
    rng = random.Random(seed)
    for _ in range(count):
        question = sample_question(rng, held_out=held_out)
        *context, _ = chat(question, "", rng, second_turn=rng.random() < 0.125)
        completions = [
            {"rank": grade(text, question), "completion": [{"role": "assistant", "content": text}]}
            for text in sample_replies(question, rng)
        ]
        yield {"context": context, "completions": completions}
