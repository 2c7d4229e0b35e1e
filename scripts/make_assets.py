"""Make the files in `gym_rm/assets/`: a tokenizer, a reward model, a policy and prompts. Fixed seeds, CPU only.

    python scripts/make_assets.py                # about 15 minutes on two busy cores
    python scripts/make_assets.py --out folder   # write to another folder

In every conversation the user asks which of three numbers is the largest or smallest, in one of many wordings, and the
assistant answers in one sentence. The answer can be checked without a model. Questions are split by their numbers: the
prompts of the environment and the evaluation pairs of the reward model use numbers that are not in the training data.

1. Train a language model to give right answers (next-token loss on the replies).
2. Train the reward model from the language model with the Bradley-Terry loss, to rank four grades of reply: right in
   a proper sentence, right in another form, wrong, and no answer.
3. Train the policy from the language model to imitate a careless assistant, who is wrong more often than right.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
)

from gym_rm.training.losses import bradley_terry

ASSETS = Path(__file__).parents[1] / "gym_rm" / "assets"
NUM_PROMPTS = 1024
NUM_LAYERS = 3
MAX_LENGTH = 32768
VOCAB_SIZE = 640
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)

# ---------------------------------------------------------------------------------------------------------------------
# Questions, good replies and bad replies
# ---------------------------------------------------------------------------------------------------------------------

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


@dataclass(frozen=True)
class Question:
    """A question of the user; `answer` is the right number."""

    text: str
    numbers: tuple[int, int, int]
    largest: bool

    @property
    def answer(self) -> int:
        return max(self.numbers) if self.largest else min(self.numbers)


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


# Grades of reply, best first. A preference pair has a reply of a better grade and one of a worse grade.
GRADES: tuple[Callable[[Question, random.Random], str], ...] = (
    lambda question, rng: say(question.answer, rng),
    right_but_badly_said,
    lambda question, rng: say(wrong_number(question, rng), rng),
    no_answer,
)
# Weight of each (better, worse) pair of grades in sampling; hard pairs have large weights.
GRADE_PAIRS = {(0, 2): 10, (0, 1): 3, (0, 3): 3, (1, 2): 2, (1, 3): 1, (2, 3): 1}


def careless_reply(question: Question, rng: random.Random, *, accuracy: float) -> str:
    """Return a reply of the careless assistant that the policy imitates; `accuracy` is its share of right replies."""
    if rng.random() < accuracy:
        return say(question.answer, rng)
    return rng.choices((GRADES[2], right_but_badly_said, no_answer), (16, 1, 1))[0](question, rng)


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


def is_second_turn(rng: random.Random) -> bool:
    """Return whether all conversations of a batch have two questions; a mixed batch would be half padding."""
    return rng.random() < 0.125


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizer and batches
# ---------------------------------------------------------------------------------------------------------------------


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer; its alphabet is all 256 bytes, so it can encode any text."""
    rng = random.Random(0)
    corpus = ["system\n", "user\n", "assistant\n"] * 2000
    for _ in range(20_000):
        question = sample_question(rng, held_out=False)
        corpus += [question.text, rng.choices(GRADES, (4, 1, 4, 1))[0](question, rng)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_LENGTH,
    )


def encode(tokenizer: PreTrainedTokenizerFast, chats: list[list[dict[str, str]]]) -> list[list[int]]:
    return tokenizer.apply_chat_template(chats, tokenize=True, return_dict=False)


def pad(rows: list[list[int]], value: int) -> torch.Tensor:
    """Return token ids padded on the right `[N, L]`; causal attention ignores this padding."""
    length = max(map(len, rows))
    return torch.tensor([row + [value] * (length - len(row)) for row in rows])


def model_config(tokenizer: PreTrainedTokenizerFast, *, num_layers: int = NUM_LAYERS, **options: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **options,
    )


def optimise(
    model: torch.nn.Module, losses: Iterator[torch.Tensor], *, steps: int, muon: float, adam: float, what: str
) -> None:
    """Train with Muon for weight matrices and AdamW for the rest, both with a warm-up and a linear decay to zero."""
    inner = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name and "score" not in name]
    outer = [p for p in model.parameters() if not any(p is q for q in inner)]
    optimizers = [
        torch.optim.Muon(inner, lr=muon, weight_decay=0.01),
        torch.optim.AdamW(outer, lr=adam, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    started, total = time.perf_counter(), 0.0
    model.train()
    for step in range(1, steps + 1):
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * min(step / 50, 1 - (step - 1) / steps)
        loss = next(losses)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        total += loss.item()
        if step % 50 == 0:
            seconds = time.perf_counter() - started
            print(f"{what}: step {step}/{steps}, loss {total / 50:.4f}, {seconds:.0f} s", flush=True)
            total = 0.0
    model.eval()


def next_token_loss(
    model: Qwen3ForCausalLM, rows: list[list[int]], labels: list[list[int]], pad_id: int
) -> torch.Tensor:
    """Return the mean cross-entropy of the tokens whose label is not -100."""
    targets = pad(labels, -100)[:, 1:]
    hidden = model.model(input_ids=pad(rows, pad_id)).last_hidden_state[:, :-1]
    chosen = targets != -100
    return F.cross_entropy(model.lm_head(hidden[chosen]), targets[chosen])


def reply_loss(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    reply: Callable[[Question, random.Random], str],
    *,
    batch_size: int,
    seed: int,
) -> Iterator[torch.Tensor]:
    """Yield the next-token loss on the last assistant turn of new conversations, including its `<|im_end|>`."""
    rng = random.Random(seed)
    while True:
        second_turn = is_second_turn(rng)
        questions = [sample_question(rng, held_out=False) for _ in range(batch_size)]
        chats = [chat(question, reply(question, rng), rng, second_turn=second_turn) for question in questions]
        rows = encode(tokenizer, chats)
        prompts = tokenizer.apply_chat_template(
            [messages[:-1] for messages in chats], tokenize=True, return_dict=False, add_generation_prompt=True
        )
        labels = [
            [-100] * len(prompt) + row[len(prompt) : -1] + [-100] for prompt, row in zip(prompts, rows, strict=True)
        ]
        yield next_token_loss(model, rows, labels, tokenizer.pad_token_id)


# ---------------------------------------------------------------------------------------------------------------------
# The reward model
# ---------------------------------------------------------------------------------------------------------------------


def reward_model_from(
    language_model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> Qwen3ForSequenceClassification:
    """Return the language model with two more layers, initialised to the identity.

    The language model predicts each digit of the right answer. The first new layer can compare the prediction with the
    digit in the reply, and the second can copy the result to the end of the reply.
    """
    model = Qwen3ForSequenceClassification(model_config(tokenizer, num_layers=NUM_LAYERS + 2, num_labels=1))
    model.model.load_state_dict(language_model.model.state_dict(), strict=False)
    for layer in model.model.layers[NUM_LAYERS:]:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


def rewards(model: Qwen3ForSequenceClassification, tokenizer: PreTrainedTokenizerFast, chats: list) -> torch.Tensor:
    """Return rewards `[N]`, read at the last token of each conversation."""
    rows = encode(tokenizer, chats)
    hidden = model.model(input_ids=pad(rows, tokenizer.pad_token_id)).last_hidden_state
    last = torch.tensor([len(row) - 1 for row in rows])
    return model.score(hidden[torch.arange(len(rows)), last])[:, 0]


def sample_pair(rng: random.Random, *, held_out: bool, second_turn: bool = False) -> tuple[tuple[int, int], list, list]:
    question = sample_question(rng, held_out=held_out)
    better, worse = rng.choices(list(GRADE_PAIRS), list(GRADE_PAIRS.values()))[0]
    chosen = chat(question, GRADES[better](question, rng), rng, second_turn=second_turn)
    rejected = [*chosen[:-1], {"role": "assistant", "content": GRADES[worse](question, rng)}]
    return (better, worse), chosen, rejected


def pair_loss(
    model: Qwen3ForSequenceClassification, tokenizer: PreTrainedTokenizerFast, *, batch_size: int, seed: int
) -> Iterator[torch.Tensor]:
    """Yield the Bradley-Terry loss plus a small penalty on squared rewards, which keeps them near zero."""
    rng = random.Random(seed)
    while True:
        second_turn = is_second_turn(rng)
        pairs = [sample_pair(rng, held_out=False, second_turn=second_turn) for _ in range(batch_size)]
        _, chosen, rejected = zip(*pairs, strict=True)
        values = rewards(model, tokenizer, [*chosen, *rejected])
        yield bradley_terry(values[:batch_size], values[batch_size:]) + 0.002 * values.square().mean()


@torch.no_grad()
def pair_accuracy(
    model: Qwen3ForSequenceClassification, tokenizer: PreTrainedTokenizerFast, *, pairs: int, seed: int
) -> dict[str, float]:
    """Return the share of held-out pairs whose better reply has the higher reward, for all pairs and by grades."""
    rng = random.Random(seed)
    wins = defaultdict(list)
    for _ in range(pairs // 256):
        grades, chosen, rejected = zip(*(sample_pair(rng, held_out=True) for _ in range(256)), strict=True)
        values = rewards(model, tokenizer, [*chosen, *rejected])
        for pair, won in zip(grades, (values[:256] > values[256:]).tolist(), strict=True):
            wins["all"].append(won)
            wins[f"grade {pair[0]} over {pair[1]}"].append(won)
    return {name: sum(won) / len(won) for name, won in sorted(wins.items())}


# ---------------------------------------------------------------------------------------------------------------------
# The policy
# ---------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def sampled_replies(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, questions: list[Question], *, sample: bool = True
) -> list[str]:
    inputs = tokenizer.apply_chat_template(
        [[{"role": "user", "content": question.text}] for question in questions],
        add_generation_prompt=True,
        padding=True,
        return_tensors="pt",
        return_dict=True,
    )
    ids = model.generate(**inputs, do_sample=sample, top_k=0, max_new_tokens=24)
    return tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def is_right(reply: str, question: Question) -> bool:
    return reply in {phrase.format(n=question.answer) for phrase in REPLIES}


def make_prompts(path: Path) -> None:
    """Write different questions about held-out numbers, with their answers."""
    rng = random.Random("prompts")
    questions: dict[str, Question] = {}
    while len(questions) < NUM_PROMPTS:
        question = sample_question(rng, held_out=True)
        questions.setdefault(question.text, question)
    with path.open("w") as file:
        for number, question in enumerate(questions.values()):
            row = {
                "prompt_id": f"numbers-{number:04d}",
                "messages": [{"role": "user", "content": question.text}],
                "answer": str(question.answer),
            }
            file.write(json.dumps(row) + "\n")


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save a model and its tokenizer to a new folder. Every user may read the files; safetensors allows only one."""
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ASSETS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--language-model-steps", type=int, default=600)
    parser.add_argument("--reward-model-steps", type=int, default=450)
    parser.add_argument("--policy-steps", type=int, default=100)
    parser.add_argument("--accuracy", type=float, default=0.33, help="share of right replies of the careless assistant")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    started = time.perf_counter()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)

    tokenizer = make_tokenizer()
    lengths = Counter(
        len(row) for row in encode(tokenizer, [sample_pair(random.Random(i), held_out=False)[1] for i in range(500)])
    )
    print(f"vocabulary {len(tokenizer)}, median conversation {sorted(lengths.elements())[250]} tokens")

    held_out = [sample_question(random.Random(f"held out {i}"), held_out=True) for i in range(512)]
    language_model = Qwen3ForCausalLM(model_config(tokenizer))
    print(f"{language_model.num_parameters():,} parameters")
    losses = reply_loss(language_model, tokenizer, GRADES[0], batch_size=64, seed=2)
    optimise(language_model, losses, steps=arguments.language_model_steps, muon=0.02, adam=3e-3, what="language model")
    replies = sampled_replies(language_model, tokenizer, held_out)
    print(f"language model: {sum(map(is_right, replies, held_out)) / len(held_out):.3f} right on held-out numbers")

    reward_model = reward_model_from(language_model, tokenizer)
    losses = pair_loss(reward_model, tokenizer, batch_size=64, seed=3)
    optimise(reward_model, losses, steps=arguments.reward_model_steps, muon=0.01, adam=1e-3, what="reward model")
    accuracy = pair_accuracy(reward_model, tokenizer, pairs=4096, seed=3)
    print("reward model, held-out pair accuracy:", json.dumps(accuracy, indent=1))

    policy = language_model
    losses = reply_loss(
        policy, tokenizer, lambda q, r: careless_reply(q, r, accuracy=arguments.accuracy), batch_size=64, seed=4
    )
    optimise(policy, losses, steps=arguments.policy_steps, muon=0.005, adam=1e-3, what="policy")
    replies = sampled_replies(policy, tokenizer, held_out)
    greedy = sampled_replies(policy, tokenizer, held_out, sample=False)
    for name, texts in (("sampled", replies), ("greedy", greedy)):
        print(f"policy, {name}: {sum(map(is_right, texts, held_out)) / len(held_out):.3f} right on held-out numbers")

    make_prompts(out / "prompts.jsonl")
    for name, model in (("reward_model", reward_model), ("policy", policy)):
        save(model, tokenizer, out / name)
    print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
