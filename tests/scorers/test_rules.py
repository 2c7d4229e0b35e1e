"""Rules for the form of a reply."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gym_rm
from gym_rm import ConfigError, Prompt
from gym_rm.scorers.rules import FormatScorer, LengthScorer, RepetitionScorer
from gym_rm.testing import check_scorer

RULES = {"format": {"format": "boxed"}, "length": {"max_length": 100}, "repetition": {}}


def value(scorer, reply, prompt=None):
    said = [[{"role": "user", "content": "say"}, {"role": "assistant", "content": reply}]]
    return scorer.score(said, None if prompt is None else [prompt]).rewards[0]


@pytest.mark.parametrize("kind", RULES)
def test_every_rule_passes_the_checks_of_scorers(kind):
    check_scorer(gym_rm.load_scorer({"kind": kind, **RULES[kind]}))


@pytest.mark.parametrize("kind", RULES)
def test_a_conversation_without_a_reply_has_no_score(kind):
    with pytest.raises(gym_rm.ScoringError, match="role 'assistant'"):
        gym_rm.load_scorer({"kind": kind, **RULES[kind]}).score([[{"role": "user", "content": "say"}]])


@pytest.mark.parametrize(
    ("name", "reply", "expected"),
    [
        ("think_answer", "<think>a\nb</think>\n<answer>18</answer>", 1.0),
        ("think_answer", "  <think></think>\n<answer></answer>\n", 1.0),
        ("think_answer", "<think>a</think><answer>18</answer>", 0.0),
        ("think_answer", "a</think>\n<answer>18</answer>", 0.0),
        ("think_answer", "Well, <think>a</think>\n<answer>18</answer>", 0.0),
        ("think_answer", "<think>a</think>\n<answer>18</answer>\n<answer>19</answer>", 0.0),
        ("boxed", r"so \boxed{18}", 1.0),
        ("boxed", r"so \boxed{\frac{1}{2}}", 1.0),
        ("boxed", r"so \boxed{}", 0.0),
        ("boxed", "so 18", 0.0),
    ],
)
def test_formats(name, reply, expected):
    assert value(FormatScorer(format=name), reply) == expected


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("a\nb</think>\n<answer>18</answer>", 1.0),
        ("<think>a</think>\n<answer>18</answer>", 1.0),  # as agents give it
        ("a\n<answer>18</answer>", 0.0),
        ("a<think>b</think>\n<answer>18</answer>", 0.0),
    ],
)
def test_a_tag_that_the_template_opened_is_taken_as_written(reply, expected):
    assert value(FormatScorer(format="think_answer", thinking="opened"), reply) == expected


def test_rules_judge_the_answer_alone_and_give_their_lowest_value_without_one():
    rules = [
        FormatScorer(pattern=r"\d+", judged="answer"),
        LengthScorer(max_length=10, judged="answer"),
        RepetitionScorer(size=1, judged="answer"),
    ]
    assert [value(rule, "<think>a a a a a a</think>18") for rule in rules] == [1.0, 0.0, 0.0]
    assert [value(rule, "<think>18") for rule in rules] == [0.0, -1.0, -1.0]


def test_a_pattern_matches_the_whole_reply():
    rule = FormatScorer(pattern=r"It is \d+\.")
    assert [value(rule, reply) for reply in ("It is 18.", "It is 18. Yes", "18")] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("pattern", [r"(a+)+b", r"(a|aa)*b", r"(.*)*,", r"(\w+\s?)*$x"])
def test_a_pattern_that_takes_exponential_time_ends_in_time(pattern):
    start = time.process_time()
    assert value(FormatScorer(pattern=pattern), "a" * 50_000) == 0.0
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "give either format or pattern"),
        ({"format": "boxed", "pattern": "a"}, "give either format or pattern"),
        ({"format": "boxd"}, "Did you mean 'boxed'"),
        ({"pattern": "("}, "must be a regular expression"),
        ({"pattern": 3}, "must be a regular expression"),
    ],
)
def test_an_invalid_format_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        FormatScorer(**settings)


def test_the_penalty_of_a_long_reply_is_the_one_of_dapo():
    rule = LengthScorer(max_length=100, buffer=20)
    lengths = (0, 80, 90, 100, 5000)
    assert [value(rule, "x" * length) for length in lengths] == [0.0, 0.0, -0.5, -1.0, -1.0]


def test_lengths_that_leave_no_reply_without_a_penalty_are_refused():
    with pytest.raises(ConfigError, match="buffer=200 must be at most"):
        LengthScorer(max_length=100, buffer=200)


@pytest.mark.parametrize(
    ("reply", "expected"),
    [("one two three four", 0.0), ("a b a b", -0.5), ("A b a B", -0.5), ("", 0.0), ("好好好好", -0.75)],
)
def test_repeated_words_are_a_penalty(reply, expected):
    assert value(RepetitionScorer(size=1), reply) == expected


LOOPS = [
    "!" * 200,
    "😀" * 50,
    "ha" * 100,
    "a" * 300,
    "lol" * 60,
    "." * 300,
    "-" * 100,
    "0" * 200,
    "{}" * 80,
    "so good!!! " * 30,
]
LOOPS += [
    "ສະບາຍດີ" * 30,
    "សួស្តី" * 30,
    "မင်္ဂလာပါ" * 30,
    "สวัสดีครับ" * 30,
    "བཀྲ་ཤིས་" * 30,
    "𠀀𠀁" * 50,
    "わかりません。" * 20,
    "नमस्ते " * 30,
]
LOOPS += [
    "👩‍👩‍👧‍👦" * 40,
    "🇩🇪🇫🇷" * 40,
    "👍🏽" * 40,
    "❤️ " * 60,
    "1️⃣" * 40,
    "a\u0301" * 80,
    "I am a helpful assistant.\n" * 20,
    "<br>" * 60,
]
LOOPS += ["It is " + "0." + "3" * 200, "---\n" * 60]


@pytest.mark.parametrize("reply", LOOPS)
def test_a_loop_is_a_repetition_in_every_script(reply):
    assert value(RepetitionScorer(), reply) < -0.75


ORDINARY = [
    "def add(a, b):\n    return a + b\n\n\nfor i in range(10):\n    if i % 2:\n        print(i)\n",
    "Results\n"
    + "=" * 40
    + "\n\nThe method works on three of four sets.\n\nDiscussion\n"
    + "-" * 40
    + "\nThe labels are noisy.",
    "| Name | Age |\n|------|-----|\n| Anna | 31 |\n| Bob | 42 |\n| Carla | 27 |\n| David | 65 |",
    ", ".join(map(str, range(1, 101))),
    "3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803482534211706798",
    "人人生而自由,在尊严和权利上一律平等。他们赋有理性和良心,并应以兄弟关系的精神相对待。人人有权享有生命、自由和人身安全。",
    "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。人間は、理性と良心とを授けられており、",
    "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ ต่างมีเหตุผลและมโนธรรม และควรปฏิบัติต่อกันด้วยเจตนารมณ์แห่งภราดรภาพ",
    "ມະນຸດທຸກຄົນເກີດມາມີກຽດສັກສີ, ສິດທິ, ເສລີພາບ ແລະ ຄວາມສະເໝີພາບເທົ່າທຽມກັນ. ທຸກໆຄົນມີເຫດຜົນ ແລະ ຄວາມຄິດຄວາມເຫັນ",
    "មនុស្សទាំងអស់កើតមកមានសេរីភាពនិងភាពស្មើគ្នាក្នុងសេចក្ដីថ្លៃថ្នូរនិងសិទ្ធិ។ មនុស្សគ្រប់រូបសុទ្ធតែមានវិចារណញ្ញាណនិងសតិសម្បជញ្ញៈ",
    "လူတိုင်းသည် တူညီ လွတ်လပ်သော ဂုဏ်သိက္ခာဖြင့် လည်းကောင်း၊ တူညီလွတ်လပ်သော အခွင့်အရေးများဖြင့် လည်းကောင်း၊ မွေးဖွားလာသူများ ဖြစ်သည်။",
    "Hahaha, that is a good one! 😀😀😀 I will tell it to my brother!!! He loves jokes about cats...",
]


@pytest.mark.parametrize("reply", ORDINARY)
def test_ordinary_text_is_hardly_a_repetition(reply):
    assert value(RepetitionScorer(), reply) > -0.05


def test_the_penalty_of_a_long_reply_takes_linear_time():
    start = time.process_time()
    for reply in ("a" * 50_000, "好" * 50_000, "a b " * 20_000, "=" * 50_000):
        assert value(RepetitionScorer(), reply) < -0.99
    assert time.process_time() - start < 5


@given(st.text(max_size=200), st.integers(1, 5))
def test_the_penalty_of_repetition_is_bounded(reply, size):
    assert -1.0 < value(RepetitionScorer(size=size), reply) <= 0.0


@pytest.mark.parametrize("kind", [*RULES, "math"])
def test_a_reply_in_text_parts_is_read_and_one_with_an_image_is_a_failed_row(kind):
    scorer = gym_rm.load_scorer({"kind": kind, **RULES.get(kind, {})})
    parts = [{"type": "text", "text": "The answer "}, {"type": "text", "text": "is 18."}]
    contents = ["The answer is 18.", parts, [*parts, {"type": "image", "image": "a.png"}], None]
    conversations = [[{"role": "user", "content": "?"}, {"role": "assistant", "content": each}] for each in contents]
    with pytest.raises(gym_rm.ScoringError, match=r"2 of 4.*part of the type 'image'") as caught:
        scorer.score(conversations, [Prompt(({"role": "user", "content": "?"},), "p", answer="18")] * 4)
    rewards = caught.value.scores.rewards
    assert rewards[0] == rewards[1]
    assert "must be a text, got None" in caught.value.scores.errors[3]
