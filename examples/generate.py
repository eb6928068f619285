"""Decode a chat prompt with a head: `python examples/generate.py`."""

import torch

from hf_heterospec.targets import load_default_head, load_default_target

model, tokenizer = load_default_target(torch.float32)
head = load_default_head()  # or HeteroSpecHead.from_pretrained("repo-or-folder")

inputs = tokenizer.apply_chat_template(
    [{"role": "user", "content": "Why is the sky blue?"}],
    add_generation_prompt=True,
    return_tensors="pt",
    return_dict=True,
)
output = model.generate(**inputs, assistant_model=head, max_new_tokens=64, do_sample=False)

print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
print(f"{head.last_statistics.tau:.2f} tokens per target pass over {head.last_statistics.rounds} passes")
