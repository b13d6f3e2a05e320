"""Print the greedy text of a runtime, as JSON: python runtimes.py RUNTIME FOLDER PROMPTS CONTEXT, prompts as ids.

ctranslate2 reads the folder of --format hf; openvino and onnxruntime-genai read that of --format onnx.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np


def ctranslate2(folder, prompts, context):
    import ctranslate2
    from ctranslate2.converters import TransformersConverter

    with tempfile.TemporaryDirectory() as made:
        TransformersConverter(str(folder)).convert(made, force=True)
        config = Path(made) / "config.json"
        settings = json.loads(config.read_text())
        settings |= {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}  # none of our vocabulary
        config.write_text(json.dumps(settings))
        model = ctranslate2.Generator(made)
        names = json.loads((Path(made) / "vocabulary.json").read_text())
        seen = []
        for ids in prompts:
            tokens = [[names[i] for i in ids]]
            (result,) = model.generate_batch(
                tokens, max_length=context - len(ids), sampling_topk=1, include_prompt_in_result=False
            )
            seen.append(result.sequences_ids[0])
        return seen


def openvino(folder, prompts, context):
    from openvino import Core

    model = Core().compile_model(folder / "model.onnx", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    past = [each for each in model.inputs if each.any_name.startswith("past")]
    seen = []
    for ids in prompts:
        text = list(ids)
        cache = {}
        for each in past:
            _, heads, _, size = each.partial_shape
            cache[each.any_name] = np.zeros((1, heads.get_length(), 0, size.get_length()), np.float32)
        new, begin = text, 0
        while len(text) < context:
            inputs = {
                "input_ids": np.array([new]),
                "attention_mask": np.ones((1, len(text)), np.int64),
                "position_ids": np.arange(begin, len(text))[None],
            }
            results = model(inputs | cache)
            cache = {name: results[name.replace("past_key_values", "present")].copy() for name in cache}
            begin, new = len(text), [int(results["logits"][0, -1].argmax())]
            text += new
        seen.append(text[len(ids) :])
    return seen


def genai(folder, prompts, context):
    """All prompts alone, then in one batch, padded on the right."""
    import onnxruntime_genai

    pad = json.loads((folder / "genai_config.json").read_text())["model"]["pad_token_id"]
    model = onnxruntime_genai.Model(str(folder))
    seen = []
    for batch in [*([ids] for ids in prompts), prompts]:
        params = onnxruntime_genai.GeneratorParams(model)
        params.set_search_options(batch_size=len(batch))
        generator = onnxruntime_genai.Generator(model, params)
        length = max(map(len, batch))
        generator.append_tokens(np.array([ids + [pad] * (length - len(ids)) for ids in batch], np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        seen += [[int(i) for i in generator.get_sequence(row)[length:]] for row in range(len(batch))]
    return seen


if __name__ == "__main__":
    runtime, folder, prompts, context = sys.argv[1:]
    print(json.dumps(globals()[runtime](Path(folder), json.loads(prompts), int(context))))
