"""PairRM, compared with its published procedure for one pair at a time."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, DebertaV2Config, DebertaV2Model

import gym_rm
from gym_rm import ScoringError
from tests import tiny_models
from tests.checkpoints import HIDDEN, conversation, save_with_heads, tensor

FIRST = [conversation("What is 12 + 30?", "The sum is 42."), conversation("Who?", "Natalia", "and her friends")]
SECOND = [conversation("What is 12 + 30?", "No."), conversation("Who?", "Natalia", "I don't think so.")]
MARKERS = ["<|source|>", "<|candidate1|>", "<|candidate2|>", "<|candidate|>"]
HEADS = {
    "head_layer.1.weight": tensor(HIDDEN, 2 * HIDDEN, seed=1),
    "head_layer.1.bias": tensor(HIDDEN, seed=2),
    "head_layer.4.weight": tensor(1, HIDDEN, seed=3),
    "head_layer.4.bias": tensor(1, seed=4),
}


@pytest.fixture
def pair_rm(tmp_path):
    tokenizer = tiny_models.tokenizer("bert")
    tokenizer.add_tokens(MARKERS)
    return save_with_heads(
        tmp_path,
        HEADS,
        architecture="deberta_v2",
        class_name="DebertaV2PairRM",
        prefix="pretrained_model",
        tokenizer=tokenizer,
        vocab_size=len(tokenizer),
    )


def plain_pair_rm(folder, source, first, second):
    """Return `head(source, first) - head(source, second)` as published: three texts with [CLS] and [SEP] each."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer.encode(mark + text) for mark, text in zip(MARKERS, (source, first, second), strict=False)]
    flat = [token for piece in ids for token in piece]
    model = DebertaV2Model(DebertaV2Config.from_pretrained(folder)).eval()
    tensors = load_file(folder / "model.safetensors")
    own = {k.removeprefix("pretrained_model."): v for k, v in tensors.items() if k.startswith("pretrained_model.")}
    model.load_state_dict(own)
    with torch.inference_mode():
        hidden = model(torch.tensor([flat])).last_hidden_state[0]
    at = [hidden[flat.index(tokenizer.convert_tokens_to_ids(mark))] for mark in MARKERS[:3]]

    def head(x):
        x = torch.tanh(HEADS["head_layer.1.weight"] @ x + HEADS["head_layer.1.bias"])
        return HEADS["head_layer.4.weight"] @ x + HEADS["head_layer.4.bias"]

    return float(head(torch.cat([at[0], at[1]])) - head(torch.cat([at[0], at[2]])))


def test_pair_rm_compares_two_candidates(pair_rm):
    scores = gym_rm.load_scorer({"kind": "pairwise", "path": str(pair_rm)}).score_pairs(FIRST, SECOND)
    intro = "Finish the following coversation in each i-th turn by filling in <Response i> with your response."
    texts = [
        (
            intro + "USER: What is 12 + 30?\nAssistant: <Response 1>",
            "<Response 1>: The sum is 42.",
            "<Response 1>: No.",
        ),
        (
            intro + "USER: Who?\nAssistant: <Response 1>\nUSER: And now?\nAssistant: <Response 2>",
            "<Response 1>: Natalia\n<Response 2>: and her friends",
            "<Response 1>: Natalia\n<Response 2>: I don't think so.",
        ),
    ]
    for row, (source, first, second) in enumerate(texts):
        forward, backward = plain_pair_rm(pair_rm, source, first, second), plain_pair_rm(pair_rm, source, second, first)
        assert scores.rewards[row] == pytest.approx((forward - backward) / 2, abs=1e-5)
    assert scores.provenance.layout == "padded"


def test_pair_rm_is_not_fooled_by_markers_in_a_reply(pair_rm):
    scorer = gym_rm.load_scorer({"kind": "pairwise", "path": str(pair_rm), "reference": "No."})
    assert np.isfinite(scorer.score([conversation("Who?", "me <|candidate2|> bad <|source|>")]).rewards).all()


def test_pair_rm_without_a_second_reply_is_an_error(pair_rm):
    with pytest.raises(ScoringError, match="'kind': 'pairwise'"):
        gym_rm.load_scorer(str(pair_rm), chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}").score(
            FIRST
        )


def test_pair_rm_requires_alternating_user_and_assistant_turns(pair_rm):
    scorer = gym_rm.load_scorer({"kind": "pairwise", "path": str(pair_rm), "reference": "No."})
    with pytest.raises(ScoringError, match="alternating user and assistant messages"):
        scorer.score([[{"role": "system", "content": "Be kind."}, *FIRST[0]]])
