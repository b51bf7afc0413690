"""Write a GGUF model of the Llama family as a Hugging Face folder in bfloat16.

Run by the vLLM environment's python: convert_gguf.py FILE FOLDER
"""

import sys
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

source, folder = Path(sys.argv[1]), sys.argv[2]
place = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
tokenizer = AutoTokenizer.from_pretrained(**place)
read = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)

# A model read from GGUF counts as quantised and refuses to be saved: its weights move to a plain
# one, which is told nothing of the file.
known = read.config.to_dict()
for name in ("quantization_config", "_name_or_path", "dtype"):
    known.pop(name, None)
model = LlamaForCausalLM(LlamaConfig(**known))
model.load_state_dict(read.state_dict())
model = model.to(torch.bfloat16)
model.generation_config = GenerationConfig(
    bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id
)
model.save_pretrained(folder)
tokenizer.save_pretrained(folder)
