"""The same through a pipeline: `python examples/pipeline.py`."""

import torch
from transformers import pipeline

from hf_heterospec.targets import load_default_head, load_default_target

model, tokenizer = load_default_target(torch.float32)
generator = pipeline("text-generation", model=model, tokenizer=tokenizer, assistant_model=load_default_head())

messages = [{"role": "user", "content": "Write a haiku about rain."}]
print(generator(messages, max_new_tokens=40, do_sample=False)[0]["generated_text"][-1]["content"])
