"""Tiny random models and a tokenizer in local folders, as transformers writes them; nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SENTENCES = (
    "the rain falls on the roof of the old mill.",
    "a miller counts the sacks and sings to the wheel.",
    "when the river is low the wheel stands still.",
    "then he reads by the fire until the rain returns.",
)
SIZES = {
    "llama": {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "max_position_embeddings": 64, "tie_word_embeddings": True,
    },
    "gpt2": {
        "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "distilbert": {
        "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 2, "max_position_embeddings": 64, "dropout": 0.0,
        "attention_dropout": 0.0, "seq_classif_dropout": 0.0,
    },
}  # fmt: skip
"""Of each kind a config small enough for a step to take milliseconds."""


def make_tokenizer() -> Any:
    """A byte-level BPE learned from the sentences: 3 special tokens, 256 bytes and a few joins."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290, special_tokens=["<s>", "</s>", "<pad>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    made.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def make_folder(folder: Path, kind: str = "llama", *, task: str = "causal", seed: int = 0, **sizes: Any) -> Path:
    """A random model of a kind of `SIZES` with its tokenizer; `task` "masked" is what encoders learn."""
    import torch
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = make_tokenizer()
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=1, pad_token_id=2, **{**SIZES[kind], **sizes}
    )
    auto = transformers.AutoModelForMaskedLM if task == "masked" else transformers.AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        auto.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    """A file of JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def texts(count: int) -> list[dict[str, Any]]:
    """Rows of different lengths: a text, a prompt with its completion, and which sentence it begins with."""
    rows = []
    for number in range(count):
        sentence = SENTENCES[number % 4]
        rows.append(
            {
                "text": sentence[: 12 + 7 * (number % 5)],
                "prompt": sentence[:9],
                "completion": sentence[9 : 14 + 5 * (number % 6)],
                "class": "abcd"[number % 4],
            }
        )
    return rows
