"""The longest input of transformers models: the last length passes, one token more does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from raytrain.models.huggingface import longest_input

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the extra `transformers`)")

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
FROM_PADDING = ("roberta", "xlm-roberta", "camembert", "mpnet", "esm", "longformer", "data2vec-text", "ibert", "luke",
                "roberta-prelayernorm", "xlm-roberta-xl", "xmod")  # fmt: skip
FROM_ZERO = ("bert", "electra", "gpt2", "opt", "roformer")
MORE: dict[str, dict[str, Any]] = {
    "longformer": {"attention_window": 4}, "esm": {"mask_token_id": 4}, "luke": {"entity_vocab_size": 8},
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2}, "opt": {"ffn_dim": 32, "word_embed_proj_dim": 16},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
}  # fmt: skip


def config_of(kind: str, positions: int, **more: Any) -> Any:
    sizes = {} if kind == "gpt2" else SIZES
    return transformers.AutoConfig.for_model(
        kind,
        vocab_size=40,
        max_position_embeddings=positions,
        **sizes,
        **{"pad_token_id": 1, **MORE.get(kind, {}), **more},
    )


def saved(config: Any, folder: Path) -> dict[str, Any]:
    config.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


def passes(config: Any, length: int) -> bool:
    ids = torch.arange(length).unsqueeze(0) % 30 + 5
    try:
        with torch.no_grad():
            transformers.AutoModel.from_config(config).eval()(input_ids=ids)
    except (IndexError, RuntimeError):
        return False
    return True


@pytest.mark.parametrize("positions", [10, 18])
@pytest.mark.parametrize("kind", FROM_PADDING)
def test_positions_that_begin_after_the_padding_token_are_fewer(kind: str, positions: int, tmp_path: Path) -> None:
    config = config_of(kind, positions)
    longest = longest_input(saved(config, tmp_path))
    assert longest == positions - 2 and passes(config, longest) and not passes(config, longest + 1)


@pytest.mark.parametrize("kind", FROM_ZERO)
def test_other_models_use_all_their_positions(kind: str, tmp_path: Path) -> None:
    config = config_of(kind, 18)
    assert longest_input(saved(config, tmp_path)) == 18 and passes(config, 18)
    assert kind == "roformer" or not passes(config, 19)


def test_the_padding_token_of_the_config_counts(tmp_path: Path) -> None:
    config = config_of("roberta", 18, pad_token_id=4)
    assert longest_input(saved(config, tmp_path / "roberta")) == 13 and passes(config, 13) and not passes(config, 14)
    config = config_of("mpnet", 18, pad_token_id=4)  # whose code has a number of its own
    assert longest_input(saved(config, tmp_path / "mpnet")) == 16 and passes(config, 16) and not passes(config, 17)
    assert longest_input({"model_type": "roberta", "max_position_embeddings": 514}) == 512
