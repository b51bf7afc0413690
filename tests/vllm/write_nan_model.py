"""Write a two-layer model whose every logit is NaN, with the tokenizer of another model.

Run by the vLLM environment's python: write_nan_model.py TOKENIZERS_FOLDER FOLDER
"""

import sys

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

source, folder = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(source)
config = LlamaConfig(
    vocab_size=len(tokenizer),
    hidden_size=128,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    bos_token_id=tokenizer.bos_token_id,
    eos_token_id=tokenizer.eos_token_id,
)
model = LlamaForCausalLM(config).to(torch.bfloat16)
torch.nn.init.constant_(model.model.norm.weight, torch.nan)
model.save_pretrained(folder)
tokenizer.save_pretrained(folder)
