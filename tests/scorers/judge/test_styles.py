"""Styles: every public form is written as it was published, and its verdict is read as it was meant.

The prompts are compared with what the projects' own code writes for the same inputs: in full, or by beginning, end and
digest. The answers are examples of the model cards and repositories.
"""

import hashlib

import pytest
from jinja2 import Template

from gym_rm import ConfigError
from gym_rm.generation.chat import ChatReply
from gym_rm.scorers.judge.options import OURS, JudgeOptions
from gym_rm.scorers.judge.questions import Questions, Shown
from gym_rm.scorers.judge.styles import load_style, style_names, style_of_model

SUM = [{"role": "user", "content": "What is 2+2?"}]
LONGER = [*SUM, {"role": "assistant", "content": "4"}, {"role": "user", "content": "Sure?"}]
SYSTEM = [{"role": "system", "content": "You are helpful."}, *SUM]
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
CARD = [{"role": "user", "content": "What is 1+1?"}]
ONE, TWO = ["4"], ["4", "I don't know"]
LEVELS = "[Is it right?]\n" + "\n".join(f"Score {level}: {level} of 5" for level in range(1, 6))
YES_NO = "[Is it right?]\nYes: 4\nNo: not 4"
PRINCIPLE = "Judge responses based on helpfulness and accuracy"


def asked(style, mode, before, replies, *, rubric=None, principle=None, reference=None):
    questions = Questions(load_style(style), mode, JudgeOptions(rubric=rubric, principle=principle))
    shown = tuple(({"role": "assistant", "content": reply},) for reply in replies)
    return questions, questions.question(Shown(before=before, replies=shown, prompt=None, reference=reference))


def short(text):
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return text if len(text) <= 200 else f"{text[:30]} ... {text[-30:]} {digest}"


RM_R1 = "Please act as an impartial jud ... val>\n\n<answer>[[A/B]]</answer> e0bf09a87f19837a"
CHATBOTS = (
    "[Client Question]\nWhat is 2+2?\n\n[The Start of Chatbot A's Response]\n4\n[The End of Chatbot A's Response]\n\n"
    "[The Start of Chatbot B's Response]\nI don't know\n[The End of Chatbot B's Response]"
)
PROMPTS = {
    "genrm": (
        ("genrm", "pairwise", CAPITAL, ["Response A", "Response B"], {}),
        [("user", CAPITAL[0]["content"]), ("response_1", "Response A"), ("response_2", "Response B")],
    ),
    "genrm, empty": (
        ("genrm", "pairwise", SUM, ["", " \n"], {}),
        [("user", "What is 2+2?"), ("response_1", "None"), ("response_2", "None")],
    ),
    "genrm, spaces": (
        ("genrm", "pairwise", SUM, [" 4 ", "4\n"], {}),
        [("user", "What is 2+2?"), ("response_1", " 4 "), ("response_2", "4\n")],
    ),
    "genrm, principle": (
        ("genrm", "pairwise", SYSTEM, TWO, {"principle": "Judge impartially."}),
        [
            ("system", "You are helpful."),
            ("user", "What is 2+2?"),
            ("principle", "Judge impartially."),
            ("response_1", "4"),
            ("response_2", "I don't know"),
        ],
    ),
    "nemotron-super-genrm": (
        ("nemotron-super-genrm", "pairwise", SUM, TWO, {}),
        [("user", "What is 2+2?"), ("response_1", "4"), ("response_2", "I don't know")],
    ),
    "nemotron-super-genrm, one reply": (
        ("nemotron-super-genrm", "score", SUM, ONE, {}),
        [("user", "What is 2+2?"), ("response_1", "4")],
    ),
    "nemotron-reward-principle": (
        ("nemotron-reward-principle", "score", CARD, ["1+1=2"], {"principle": "correctness"}),
        [
            ("user", "What is 1+1?"),
            ("assistant", "1+1=2"),
            (
                "user",
                "Evaluate the response to the previous prompt in terms of whether it satisfies this principle: "
                "correctness. Only answer Yes or No.",
            ),
        ],
    ),
    "nemotron-genrm-principle": (
        ("nemotron-genrm-principle", "score", CARD, ["1+1=2"], {"principle": "correctness"}),
        [("user", "What is 1+1?"), ("assistant", "1+1=2"), ("principle", "correctness")],
    ),
    "rewardanything": (
        (
            "rewardanything",
            "listwise",
            CAPITAL,
            ["Paris is the capital of France.", "I think it might be Lyon or Paris."],
            {"principle": PRINCIPLE},
        ),
        [
            ("system", '\nYou are an evaluator judging  ... ["model-2", "model-1", ...]\n}\n e4a48f412b96a723'),
            ("user", '{"principle": "Judge responses ...  it might be Lyon or Paris."}} 43aa3521c75a08c5'),
        ],
    ),
    "rm-r1": (("rm-r1", "pairwise", SUM, TWO, {}), [("system", RM_R1), ("user", CHATBOTS)]),
    "rm-r1, longer": (
        ("rm-r1", "pairwise", LONGER, TWO, {}),
        [
            ("system", RM_R1),
            ("user", "[The Start of the Conversation ... ween Chatbot B and the Client] 4dc3b9080f069415"),
        ],
    ),
    "rm-r1-distill": (
        ("rm-r1-distill", "pairwise", SUM, TWO, {}),
        [("user", "Please act as an impartial jud ... swer>' if Chatbot B is better. bf2b625e2fb7b337")],
    ),
    "rm-r1-distill, longer": (
        ("rm-r1-distill", "pairwise", LONGER, TWO, {}),
        [("user", "Please act as an impartial jud ... swer>' if Chatbot B is better. d59f7188e76d6798")],
    ),
    "prometheus": (
        ("prometheus", "score", SUM, ONE, {}),
        [("user", "You are a fair judge assistant ...  and inquiries.\n\n###Feedback:  d1c4eb0f3733c87e")],
    ),
    "prometheus, reference": (
        ("prometheus", "score", SUM, ONE, {"reference": "Four"}),
        [("user", "You are a fair judge assistant ...  and inquiries.\n\n###Feedback:  48bb548b99842c50")],
    ),
    "prometheus, longer": (
        ("prometheus", "score", LONGER, ONE, {}),
        [("user", "You are a fair judge assistant ...  and inquiries.\n\n###Feedback:  8f45ba5eacccd3ba")],
    ),
    "prometheus, pair": (
        ("prometheus", "pairwise", SUM, TWO, {}),
        [("user", "You are a fair judge assistant ...  or questions?]\n\n###Feedback:  2b892288f72037f9")],
    ),
    "prometheus, pair, reference": (
        ("prometheus", "pairwise", SUM, TWO, {"rubric": "Is it right?", "reference": "Four"}),
        [("user", "You are a fair judge assistant ... c:\nIs it right?\n\n###Feedback:  7e9ae4ba6087df61")],
    ),
    "selene": (
        ("selene", "score", SUM, ONE, {"rubric": LEVELS}),
        [("user", "You are tasked with evaluating ... core 4: 4 of 5\nScore 5: 5 of 5 a785319abbd78644")],
    ),
    "selene, reference": (
        ("selene", "score", SUM, ONE, {"rubric": LEVELS, "reference": "Four"}),
        [("user", "You are tasked with evaluating ... 5 of 5\n\nReference answer:\nFour 476efc0495f8534a")],
    ),
    "selene, pair": (
        ("selene", "pairwise", SUM, TWO, {"rubric": LEVELS}),
        [("user", "You are a helpful assistant in ... \nScore Rubrics:\n[Is it right?] e44bd4576b327d71")],
    ),
    "selene-yes-no": (
        ("selene-yes-no", "score", SUM, ONE, {"rubric": YES_NO}),
        [("user", "You are tasked with evaluating ... Is it right?]\nYes: 4\nNo: not 4 fbf22357fa2b2995")],
    ),
    "selene-yes-no, reference": (
        ("selene-yes-no", "score", SUM, ONE, {"rubric": YES_NO, "reference": "Four"}),
        [("user", "You are tasked with evaluating ...  not 4\n\nReference answer:\nFour e800b6fb79c67e2d")],
    ),
    "skywork-critic": (
        ("skywork-critic", "pairwise", SUM, TWO, {}),
        [("user", "Please act as an impartial jud ...  End of Assistant B's Answer]\n cb8d3d87845d7724")],
    ),
    "arena-hard": (
        ("arena-hard", "pairwise", SUM, TWO, {}),
        [
            ("system", 'Please act as an impartial jud ... inal verdict is tie: [[A=B]]". 03f68010febd7a64'),
            (
                "user",
                "<|User Prompt|>\nWhat is 2+2?\n\n<|The Start of Assistant A's Answer|>\n4\n<|The End of Assistant A's "
                "Answer|>\n\n<|The Start of Assistant B's Answer|>\nI don't know\n<|The End of Assistant B's Answer|>",
            ),
        ],
    ),
    "ruler": (
        ("ruler", "listwise", SYSTEM, TWO, {}),
        [
            ("system", "\n        All of the trajectori ... al but does not complete it.\n\n bd2069f2fafae979"),
            ("user", '<context>\n[{"role": "system",  ... "I don\'t know"}]\n</trajectory> 9835218f23b8d7c2'),
        ],
    ),
}


@pytest.mark.parametrize(("case", "published"), PROMPTS.values(), ids=PROMPTS)
def test_a_prompt_is_the_published_one(case, published):
    *where, fields = case
    _, question = asked(*where, **fields)
    assert [(message["role"], short(message["content"])) for message in question.messages] == published


ANSWERS = {
    "genrm": (
        "genrm",
        "pairwise",
        'Evaluation:\n```json\n{"score_1": 4, "score_2": 3, "ranking": 2}\n```\n',
        (4, 3),
    ),
    "genrm, tie": ("genrm", "pairwise", '{"score_1": 3, "score_2": 3, "ranking": 1}', (5.5, 0.5)),
    "nemotron-super-genrm": (
        "nemotron-super-genrm",
        "pairwise",
        "[The Begin of Individual Scores]\n\\boxed{2, 4}\n[The End of Individual Scores]\n\n"
        "[The Begin of Ranking Score]\n\\boxed{6}\n[The End of Ranking Score]\n",
        (2, 4),
    ),
    "nemotron-super-genrm, one reply": (
        "nemotron-super-genrm",
        "score",
        "[The Begin of Individual Scores]\n\\boxed{3} \n[The End of Individual Scores]\n",
        (3,),
    ),
    "nemotron-reward-principle": (
        "nemotron-reward-principle",
        "score",
        ChatReply("Yes", finished=False, top_log_probs=(("Yes", {"Yes": -0.0077, "No": -4.8827}),)),
        (4.875,),
    ),
    "nemotron-genrm-principle": (
        "nemotron-genrm-principle",
        "score",
        ChatReply(
            "The response says 3. No",
            finished=True,
            top_log_probs=((" No", {" No": -1e-4, "No": -12.0}), ("<|im_end|>", {"<|im_end|>": 0.0})),
        ),
        (-50 + 1e-4,),
    ),
    "rewardanything": (
        "rewardanything",
        "listwise",
        '{\n  "scores": {"model-1": 2, "model-2": 4},\n  "best-to-worst": ["model-2", "model-1"]\n}\n',
        (2, 4),
    ),
    "rm-r1": (
        "rm-r1",
        "pairwise",
        "B adds nothing.\n</eval>\n\n<answer>[[A]]</answer>",
        (1, 0),
    ),
    "rm-r1-distill": ("rm-r1-distill", "pairwise", "Chatbot A is too brief.\n\n<answer>[[B]]</answer>\n", (0, 1)),
    "prometheus": ("prometheus", "score", "It meets the criteria for a score of 5. [RESULT] 5", (5,)),
    "prometheus, pair": ("prometheus", "pairwise", "Response B is the superior response. [RESULT] B", (0, 1)),
    "selene": ("selene", "score", "**Reasoning:** It lacks depth in some areas.\n\n**Result:** 4", (4,)),
    "selene, pair": ("selene", "pairwise", "**Reasoning:** A is right.\n\n**Result:** A", (1, 0)),
    "selene-yes-no": ("selene-yes-no", "score", "**Reasoning:** It is 4.\n\n**Result:** Yes", (1,)),
    "skywork-critic": ("skywork-critic", "pairwise", "[[A]]", (1, 0)),
    "arena-hard": (
        "arena-hard",
        "pairwise",
        "My answer: 4.\n\n**Final Verdict:** Assistant A is significantly better: [[A>>B]]\n\nThe key reasons are two.",
        (1, 0),
    ),
    "ruler": (
        "ruler",
        "listwise",
        '{"scores": [{"trajectory_id": "2", "explanation": "It gives up.", "score": 0.1}, '
        '{"trajectory_id": "1", "explanation": "It is right.", "score": 0.9}]}',
        (0.9, 0.1),
    ),
}


@pytest.mark.parametrize(("style", "mode", "answer", "numbers"), ANSWERS.values(), ids=ANSWERS)
def test_an_answer_reads_as_published(style, mode, answer, numbers):
    needed = {name: {"rubric": LEVELS, "principle": "correctness"}[name] for name in load_style(style).needs}
    questions, question = asked(style, mode, SUM, ONE if mode == "score" else TWO, **needed)
    reply = ChatReply(answer, finished=True) if isinstance(answer, str) else answer
    assert questions.read(reply, question) == pytest.approx(numbers)


def test_a_polar_text_joins_the_prompt_with_both_replies():
    text = Template(load_style("polar").forward.text).render(prompt="1\n2", reference="right", reply="wrong")
    assert text == "1\n2\nright<|reward|>1\n2\nwrong[UNUSED_TOKEN_130]"


@pytest.mark.parametrize("name", [name for name in style_names() if name != OURS])
def test_a_style_has_a_source_and_a_tested_prompt(name):
    style = load_style(name)
    assert style.about
    assert style.source
    assert set(style.modes) == {case[1] for case, _ in PROMPTS.values() if case[0] == name}


MODELS = {
    "nvidia/Qwen3-Nemotron-235B-A22B-GenRM": "genrm",
    "nvidia/Qwen3-Nemotron-235B-A22B-GenRM-2603": "genrm",
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-GenRM": "genrm",
    "nvidia/Llama-3_3-Nemotron-Super-49B-GenRM-Multilingual": "nemotron-super-genrm",
    "nvidia/Llama-3.3-Nemotron-70B-Reward-Principle": "nemotron-reward-principle",
    "nvidia/Qwen3-Nemotron-32B-GenRM-Principle": "nemotron-genrm-principle",
    "WisdomShell/RewardAnything-8B-v1": "rewardanything",
    "gaotang/RM-R1-Qwen2.5-Instruct-14B": "rm-r1",
    "gaotang/RM-R1-DeepSeek-Distilled-Qwen-32B": "rm-r1-distill",
    "/models/prometheus-8x7b-v2.0": "prometheus",
    "AtlaAI/Selene-1-Mini-Llama-3.1-8B": "selene",
    "internlm/POLAR-1_8B": "polar",
    "Skywork/Skywork-Critic-Llama-3.1-70B": "skywork-critic",
    "internlm/POLAR-7B-Base": None,
    "Qwen/Qwen3-8B": None,
}


@pytest.mark.parametrize("model", MODELS)
def test_a_model_has_the_style_of_its_family(model):
    assert style_of_model(model) == MODELS[model]


REFUSED = {
    "ContextualAI/LMUnit-qwen2.5-72b": "style of your own",
    "nvidia/Qwen3-Nemotron-14B-BRRM": "Take nemotron-super-genrm",
    "rubricreward/R3-Qwen3-14B-LoRA-4k": "style of your own",
    "nuojohnchen/JudgeLRM-7B": "Take rm-r1",
    "BBQGOD/DeepSeek-GRM-27B-MetaRM": "Take rewardanything",
}


@pytest.mark.parametrize("model", REFUSED)
def test_a_model_without_a_style_says_what_to_take_instead(model):
    with pytest.raises(ConfigError, match=REFUSED[model]):
        style_of_model(model)
