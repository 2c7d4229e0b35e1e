"""Small random models of real architectures, saved as plain Hugging Face folders.

This is not a test file. Fixtures and benchmarks call `tokenizer(style)`, `save_reward_model(folder, architecture)` and
`save_policy(folder)`. The tokenizers are byte-level BPE (or Unigram, WordPiece), trained on a few lines. Their chat
templates resemble those of the named families.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

CORPUS = [
    "What is the sum of 12 and 30? The sum is 42, because 12 + 30 = 42.",
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May.",
    "I don't think that is a good idea. Could you tell me more about what you are trying to do?",
    "user assistant system model Human The the and of to in is that it you for was on are with as",
    "She makes 9 * 2 = $18 every day at the farmer's market. The answer is 18.",
]

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}"
    "{% endif %}{% set last = namespace(index=0) %}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{% set last.index = loop.index0 %}{% endif %}{% endfor %}{% for message in messages %}"
    "{% set content = message['content'] %}"
    "{% if message['role'] == 'assistant' and '</think>' in content and loop.index0 < last.index %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' "
    "+ message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'system' %}"
    "{{ '[SYSTEM_PROMPT] ' + message['content'] + '[/SYSTEM_PROMPT]' }}{% else %}"
    "{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
PLAIN = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)

# style: (template, special tokens, bos, eos, pad)
STYLES: dict[str, tuple[str | None, list[str], str | None, str | None, str | None]] = {
    "chatml": (CHATML, ["<|im_start|>", "<|im_end|>", "<|endoftext|>"], None, "<|im_end|>", "<|endoftext|>"),
    "qwen": (QWEN, ["<|im_start|>", "<|im_end|>", "<|endoftext|>"], None, "<|im_end|>", "<|endoftext|>"),
    "llama3": (
        LLAMA3,
        ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "<|begin_of_text|>",
        "<|eot_id|>",
        None,
    ),
    "gemma": (GEMMA, ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"], "<bos>", "<eos>", "<pad>"),
    "mistral": (
        MISTRAL,
        ["<s>", "</s>", "<unk>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"],
        "<s>",
        "</s>",
        None,
    ),
    "plain": (PLAIN, ["<|endoftext|>"], None, "<|endoftext|>", "<|endoftext|>"),
    "bert": (None, ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], None, None, "[PAD]"),
    "roberta": (None, ["<s>", "<pad>", "</s>", "<unk>", "<mask>"], "<s>", "</s>", "<pad>"),
    "unigram": (CHATML, ["<pad>", "<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"], "<s>", "</s>", "<pad>"),
}


def tokenizer(style: str = "chatml", vocab_size: int = 400, **overrides: Any) -> PreTrainedTokenizerFast:
    """Return a small tokenizer in the style of a family. `overrides` are arguments of `PreTrainedTokenizerFast`."""
    template, special, bos, eos, pad = STYLES[style]
    tokens = [AddedToken(token, normalized=False, special=True) for token in special]
    if style == "bert":
        backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        backend.normalizer = normalizers.BertNormalizer(lowercase=True)
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        backend.decoder = decoders.WordPiece()
        trainer: Any = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=tokens, show_progress=False)
    elif style == "unigram":
        backend = Tokenizer(models.Unigram())
        backend.normalizer = normalizers.NFKC()
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        backend.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=vocab_size, special_tokens=tokens, unk_token="<unk>", show_progress=False
        )
    else:
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=tokens,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
    backend.train_from_iterator(CORPUS, trainer)
    named: dict[str, Any] = {"bos_token": bos, "eos_token": eos, "pad_token": pad, "chat_template": template}
    if style in ("mistral", "unigram"):
        named["unk_token"] = "<unk>"
    if style == "bert":
        cls, sep = backend.token_to_id("[CLS]"), backend.token_to_id("[SEP]")
        backend.post_processor = processors.BertProcessing(("[SEP]", sep), ("[CLS]", cls))
        named |= {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]", "mask_token": "[MASK]"}
        named["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    if style == "roberta":
        sep, cls = backend.token_to_id("</s>"), backend.token_to_id("<s>")
        backend.post_processor = processors.RobertaProcessing(("</s>", sep), ("<s>", cls))
        named |= {"cls_token": "<s>", "sep_token": "</s>", "unk_token": "<unk>", "mask_token": "<mask>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **(named | overrides))


# Decoders have heads of 16 numbers: compiled flex_attention has no smaller ones.
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
WIDE = SMALL | {"hidden_size": 64, "num_key_value_heads": 2}  # for configurations without `head_dim`
GROUPED = SMALL | {"num_key_value_heads": 2, "head_dim": 16}

# architecture: (model_type, tokenizer style, config)
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "llama3", GROUPED),
    "qwen2": ("qwen2", "qwen", GROUPED | {"use_sliding_window": False}),
    "qwen3": ("qwen3", "qwen", GROUPED),
    "mistral": ("mistral", "mistral", GROUPED | {"sliding_window": 16}),
    "gemma2": ("gemma2", "gemma", GROUPED | {"sliding_window": 16, "query_pre_attn_scalar": 16}),
    "gemma3": ("gemma3_text", "gemma", GROUPED | {"sliding_window": 16, "sliding_window_pattern": 2}),
    "gpt_neox": ("gpt_neox", "plain", WIDE),
    "opt": ("opt", "plain", WIDE | {"ffn_dim": 64, "word_embed_proj_dim": 64, "max_position_embeddings": 4096}),
    "gpt2": ("gpt2", "chatml", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 4096}),
    "bloom": ("bloom", "plain", {"hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "mixtral": ("mixtral", "mistral", GROUPED | {"num_local_experts": 4, "sliding_window": None}),
    "phimoe": ("phimoe", "mistral", GROUPED | {"num_local_experts": 4, "sliding_window": 40}),
    "phi3": (
        "phi3",
        "mistral",
        SMALL | {"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": None, "pad_token_id": 1},
    ),
    "gpt_oss": ("gpt_oss", "qwen", GROUPED | {"num_local_experts": 4, "sliding_window": 16}),
    "deepseek_v3": (
        "deepseek_v3",
        "qwen",
        SMALL
        | {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
        | {"qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
        | {"n_group": 1, "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1},
    ),
    "doge": ("doge", "qwen", GROUPED),
    "jamba": (
        "jamba",
        "qwen",
        WIDE | {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "mamba_d_state": 8},
    ),
    "minimax": ("minimax", "qwen", GROUPED | {"num_local_experts": 4}),
    "xlnet": ("xlnet", "roberta", {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}),
    "bert": ("bert", "bert", SMALL | {"max_position_embeddings": 4096}),
    "roberta": ("roberta", "mistral", SMALL | {"max_position_embeddings": 4099, "pad_token_id": 2}),
    "deberta_v2": (
        "deberta-v2",
        "bert",
        SMALL
        | {"max_position_embeddings": 4096, "type_vocab_size": 0, "relative_attention": True}
        | {"pos_att_type": ["p2c", "c2p"], "position_buckets": 32, "norm_rel_ebd": "layer_norm", "share_att_key": True},
    ),
    "modernbert": (
        "modernbert",
        "mistral",
        SMALL
        | {"global_attn_every_n_layers": 2, "local_attention": 16, "max_position_embeddings": 4096}
        | {"pad_token_id": 2, "cls_token_id": 0, "sep_token_id": 1},
    ),
}
# Architectures that the tree layout does not support, and the layout that is exact for them.
FALLBACKS = {
    "bloom": "padded",  # a position bias instead of positions
    "doge": "padded",  # a mask that depends on the text, and in older versions of transformers on the padding
    "jamba": "padded",  # a recurrent state
    "minimax": "padded",  # linear attention
    "xlnet": "one_by_one",  # padding shifts its positions
}
DECODERS = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gpt_neox", "opt", "gpt2", "bloom", "mixtral")
ENCODERS = ("bert", "roberta", "deberta_v2", "modernbert")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # of models in tests of what a GPU runs


def layouts(architecture: str) -> tuple[str, ...]:
    """Return the layouts that are right for an architecture. On a GPU too, where a failure to compile has another."""
    exact = FALLBACKS.get(architecture, "padded" if architecture in ENCODERS else "tree")
    return (exact, "one_by_one") if architecture == "doge" else (exact,)


# Architectures that transformers has no classifier for.
POLICIES = {"granite": ("granite", "qwen", WIDE)}


def _config(architecture: str, tokenizer: PreTrainedTokenizerFast, **overrides: Any) -> Any:
    model_type, _, settings = (ARCHITECTURES | POLICIES)[architecture]
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "cls_token_id", "sep_token_id")
    tokens = {name: getattr(tokenizer, name) for name in names if getattr(tokenizer, name) is not None}
    return AutoConfig.for_model(model_type, **({"vocab_size": len(tokenizer)} | tokens | settings | overrides))


def attention(config: Any) -> str | None:
    """Return `"eager"` for a soft cap of attention logits, which older versions of transformers ignore otherwise."""
    return "eager" if getattr(config, "attn_logit_softcapping", None) else None


def reward_model(architecture: str = "qwen3", *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Return a random sequence classifier in float32. Its weights are large, so that scores differ clearly."""
    overrides = {"num_labels": 1, "initializer_range": 0.3} | overrides
    config = _config(architecture, tokenizer(ARCHITECTURES[architecture][1]), **overrides)
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation=attention(config))
    model.float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.unique().numel() == 1:  # initial biases and norms, which could hide errors
                parameter += 0.1 * torch.randn_like(parameter)
    return model


def save_reward_model(folder: Path | str, architecture: str = "qwen3", *, seed: int = 0, **overrides: Any) -> Path:
    """Save `reward_model(...)` with its tokenizer and template, and return the folder."""
    model = reward_model(architecture, seed=seed, **overrides)
    model.save_pretrained(folder)
    tokenizer(ARCHITECTURES[architecture][1]).save_pretrained(folder)
    return Path(folder)


def plain_ids(tok: Any, conversation: list[dict[str, str]]) -> dict[str, torch.Tensor]:
    """Return the inputs that transformers computes: with the chat template, or as a text pair without one."""
    if tok.chat_template is not None:
        ids = tok.apply_chat_template(conversation, tokenize=True, return_dict=False)
        return {"input_ids": torch.tensor([ids])}
    context = "\n".join(message["content"] for message in conversation[:-1])
    return dict(tok(context, conversation[-1]["content"], return_tensors="pt"))


@torch.inference_mode()
def plain_rewards(folder: Path | str, conversations: list[list[dict[str, str]]]) -> np.ndarray[Any, Any]:
    """Return reference rewards: transformers alone, one conversation at a time, in float32."""
    exact = attention(AutoConfig.from_pretrained(folder))
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32, attn_implementation=exact)
    model.eval()
    tok = AutoTokenizer.from_pretrained(folder)
    fresh, rewards = model, []
    for conversation in conversations:
        model = copy.deepcopy(fresh)  # dynamic rotary frequencies depend on earlier texts
        inputs = plain_ids(tok, conversation)
        if getattr(model.config, "type_vocab_size", 0) < 2:
            inputs.pop("token_type_ids", None)
        rewards.append(model(**inputs).logits[0, 0].item())
    return np.array(rewards)


def policy(architecture: str = "qwen3", *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Return a random causal language model in float32."""
    config = _config(architecture, tokenizer((ARCHITECTURES | POLICIES)[architecture][1]), **overrides)
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention(config)).float().eval()


def save_policy(folder: Path | str, architecture: str = "qwen3", *, seed: int = 0, **overrides: Any) -> Path:
    """Save a random causal language model with its tokenizer and template, and return the folder."""
    policy(architecture, seed=seed, **overrides).save_pretrained(folder)
    tokenizer((ARCHITECTURES | POLICIES)[architecture][1]).save_pretrained(folder)
    return Path(folder)
