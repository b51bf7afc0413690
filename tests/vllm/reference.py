"""Print log P of every token under Hugging Face transformers, in nats; null for the first.

Run by the vLLM environment's python: reference.py FOLDER [float32|bfloat16]
stdin is a JSON list of lists of token ids, stdout the same lists with the values.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM

folder, precision = sys.argv[1], (sys.argv[2:] or ["float32"])[0]
model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, precision))


def logprobs(ids: list[int]) -> list[float | None]:
    """Return log P of each token given those before it."""
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0].float()
    values = logits[:-1].log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])
    return [None, *values[:, 0].tolist()]


json.dump([logprobs(ids) for ids in json.load(sys.stdin)], sys.stdout)
