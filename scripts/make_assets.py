"""Make the files in `gym_rm/assets/`: a tokenizer, a policy, prompts, and what the reward model is trained from.

    python scripts/make_assets.py --work build   # about 8 minutes on two busy cores
    gym-rm train embedded  # the reward model, from the files in build: 10 to 20 minutes
    install -m 644 build/reward_model/final/{config.json,model.safetensors} gym_rm/assets/reward_model

Fixed seeds, CPU only. The task is described in `agents/three_numbers.py`.

1. Train a language model to give right answers (next-token loss on the replies).
2. Add two layers and a head to it: the model that training of the reward model starts from.
3. Write comparisons of good and bad replies, for training and (other numbers) for validation.
4. Train the policy from the language model to imitate a careless assistant, who is wrong more often than right.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
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

sys.path.insert(0, str(Path(__file__).parents[1]))

from agents.three_numbers import (
    GRADES,
    Question,
    careless_reply,
    chat,
    comparisons,
    grade,
    sample_question,
)

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
# Tokenizer and batches
# ---------------------------------------------------------------------------------------------------------------------


def make_tokenizer(more_texts: Iterable[str] = ()) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer; its alphabet is all 256 bytes, so it can encode any text."""
    rng = random.Random(0)
    corpus = ["system\n", "user\n", "assistant\n"] * 2000 + list(more_texts)
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
        second_turn = rng.random() < 0.125  # of the whole batch: a mixed batch would be half padding
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


def share_right(replies: list[str], questions: list[Question]) -> float:
    """Return the share of replies that give the right number in a proper sentence."""
    return sum(grade(*row) == 0 for row in zip(replies, questions, strict=True)) / len(questions)


def write_rows(path: Path, rows: Iterable[dict]) -> None:
    with path.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def make_prompts(path: Path) -> None:
    """Write different questions about held-out numbers, with their answers."""
    rng = random.Random("prompts")
    questions: dict[str, Question] = {}
    while len(questions) < NUM_PROMPTS:
        question = sample_question(rng, held_out=True)
        questions.setdefault(question.text, question)
    rows = (
        {
            "prompt_id": f"numbers-{number:04d}",
            "messages": [{"role": "user", "content": question.text}],
            "answer": str(question.answer),
        }
        for number, question in enumerate(questions.values())
    )
    write_rows(path, rows)


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save a model and its tokenizer to a new folder. Every user may read the files; safetensors allows only one."""
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ASSETS, help="folder of the policy and the prompts")
    parser.add_argument("--work", type=Path, default=Path("build"), help="folder of what the reward model is made from")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--language-model-steps", type=int, default=600)
    parser.add_argument("--comparisons", type=int, default=14_400, help="comparisons to train the reward model on")
    parser.add_argument("--policy-steps", type=int, default=100)
    parser.add_argument("--accuracy", type=float, default=0.33, help="share of right replies of the careless assistant")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    started = time.perf_counter()
    out, work = arguments.out, arguments.work
    for folder in (out, work):
        folder.mkdir(parents=True, exist_ok=True)

    make_prompts(out / "prompts.jsonl")
    write_rows(work / "train.jsonl", comparisons(arguments.comparisons, seed="train", held_out=False))
    write_rows(work / "validation.jsonl", comparisons(512, seed="validation", held_out=True))

    tokenizer = make_tokenizer()
    held_out = [sample_question(random.Random(f"held out {i}"), held_out=True) for i in range(512)]
    language_model = Qwen3ForCausalLM(model_config(tokenizer))
    print(f"vocabulary {len(tokenizer)}, {language_model.num_parameters():,} parameters")
    losses = reply_loss(language_model, tokenizer, GRADES[0], batch_size=64, seed=2)
    optimise(language_model, losses, steps=arguments.language_model_steps, muon=0.02, adam=3e-3, what="language model")
    replies = sampled_replies(language_model, tokenizer, held_out)
    print(f"language model: {share_right(replies, held_out):.3f} right on held-out numbers")
    save(reward_model_from(language_model, tokenizer), tokenizer, work / "reward_model_start")

    policy = language_model
    losses = reply_loss(
        policy, tokenizer, lambda q, r: careless_reply(q, r, accuracy=arguments.accuracy), batch_size=64, seed=4
    )
    optimise(policy, losses, steps=arguments.policy_steps, muon=0.005, adam=1e-3, what="policy")
    for name, sample in (("sampled", True), ("greedy", False)):
        replies = sampled_replies(policy, tokenizer, held_out, sample=sample)
        print(f"policy, {name}: {share_right(replies, held_out):.3f} right on held-out numbers")
    save(policy, tokenizer, out / "policy")
    tokenizer.save_pretrained(out / "reward_model")
    print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
