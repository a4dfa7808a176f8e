#!/usr/bin/env python3
"""Makes two tiny models with random weights, for engines to run where there is neither a GPU nor a download.

    .venv-engines/bin/python scripts/make_tiny_models.py DIRECTORY

writes `DIRECTORY/llama`, and `DIRECTORY/moe`, of which vLLM runs the ranks in lockstep: it counts as a
mixture of experts, but every layer of it is dense, since real experts on two ranks need collectives that CPUs
do not have. Tokenizer, chat template and EOS ids are the demo model's. Needs torch and transformers, which
`make_engines_env.py` installs. The same releases of them make the same weights.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

DEMO = Path(__file__).resolve().parent.parent / "smg" / "data" / "demo-model"
SEED = 20261
SPREAD = 0.4  # of the weights: wide enough that a greedy completion does not repeat one token
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,  # of 32, the smallest that vLLM's attention for CPUs has
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": SPREAD,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
EXPERTS = {
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "mlp_only_layers": list(range(SHAPE["num_hidden_layers"])),
}


def write(directory: Path, model: type[PreTrainedModel], config: PreTrainedConfig) -> None:
    """The model with random weights, beside the demo model's tokenizer."""
    torch.manual_seed(SEED)
    made = model(config)
    made.generation_config = GenerationConfig(**json.loads((DEMO / "generation_config.json").read_text()))
    made.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, directory)
    print(f"{directory}: {made.num_parameters()} parameters")


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    directory = Path(sys.argv[1])
    ids = json.loads((DEMO / "config.json").read_text())
    shape = {**SHAPE, **{key: ids[key] for key in ("vocab_size", "bos_token_id", "eos_token_id")}}
    write(directory / "llama", LlamaForCausalLM, LlamaConfig(**shape))
    write(directory / "moe", Qwen2MoeForCausalLM, Qwen2MoeConfig(**shape, **EXPERTS))


if __name__ == "__main__":
    main()
