"""What transformers itself generates from a model folder: the reference of all exactness tests."""

from collections.abc import Sequence
from pathlib import Path

import torch


class TransformersReference:
    """Greedy tokens of one model folder, one prompt at a time, always `num_new` of them."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._model.generation_config.eos_token_id = None

    def generate(self, prompt: Sequence[int], num_new: int) -> list[int]:
        ids = torch.tensor([prompt])
        out = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new, do_sample=False, pad_token_id=0
        )
        return out[0, len(prompt) :].tolist()
