"""Print what Optimum and transformers 4 make of a folder, as JSON: python generate.py FOLDER PROMPT..."""

import json
import sys

import transformers
from optimum.onnxruntime import ORTModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, *prompts = sys.argv[1:]
seen = {"version": transformers.__version__}
for name, loader in {"optimum": ORTModelForCausalLM, "transformers": AutoModelForCausalLM}.items():
    model = loader.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [model.generate(**tokenizer(prompt, return_tensors="pt"))[0] for prompt in prompts]
    seen[name] = tokenizer.batch_decode(ids, skip_special_tokens=True)

    tokenizer.pad_token = "\n"
    encoded = tokenizer(prompts, padding=True, return_tensors="pt")
    new = tokenizer.batch_decode(model.generate(**encoded)[:, encoded.input_ids.size(1) :])
    seen[f"{name}, batch"] = [prompt + text for prompt, text in zip(prompts, new)]
print(json.dumps(seen))
