"""Chat models that write what a table says: real checkpoints whose next token depends only on the last one."""

import tiny_models
import torch
from transformers import LlamaConfig, LlamaForCausalLM

END = "<|im_end|>"


def save_chain(folder, chain, *, style="chatml", positions=4096, **overrides):
    """Save a Llama that writes tokens by a table, and return the folder as a text.

    Args:
        folder: an empty folder.
        chain: the next tokens of a token, all equally likely; the first one at temperature 0. The table starts with
            the end of the generation prompt, a line break.
        style: style of the tokenizer.
        positions: number of positions of the model.
    """
    tokenizer = tiny_models.tokenizer(style, **overrides)
    pieces = {piece for last, following in chain.items() for piece in (last, *following)}
    tokenizer.add_tokens(sorted(pieces - {"\n", END}))
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=positions,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    number = {piece: k + 1 for k, piece in enumerate(chain)}
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.zero_()[:, 0] = 1.0
        model.lm_head.weight.zero_()
        for last, following in chain.items():
            ids = tokenizer.encode(last, add_special_tokens=False)
            assert len(ids) == 1, (last, ids)
            model.model.embed_tokens.weight[ids[0]] = torch.eye(32)[number[last]]
            for rank, piece in enumerate(following):
                (after,) = tokenizer.encode(piece, add_special_tokens=False)
                model.lm_head.weight[after, number[last]] = 8.0 - 1e-6 * rank
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def save_judge(folder, **options):
    """Save a judge that writes a random score from 1 to 9, or 1 at temperature 0."""
    scores = [f" {score}" for score in range(1, 10)]
    return save_chain(folder, {"\n": ["Score:"], "Score:": scores, **{each: [END] for each in scores}}, **options)


def save_comparing_judge(folder):
    """Save a judge that writes a random choice, or A at temperature 0."""
    chain = {"\n": ["Verdict:"], "Verdict:": [" A", " B", " tie"], " A": [END], " B": [END], " tie": [END]}
    return save_chain(folder, chain)
