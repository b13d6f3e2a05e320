"""A causal language model of transformers, run by our own loop and sampler: sample.py --engine hf."""

from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

from kvgpt.checkpoint import check_finite
from kvgpt.cli import first_line
from kvgpt.files import check_folder
from kvgpt.tokenizer import tokenizer_from_json
from model import eval_mode


class HuggingFaceGPT(nn.Module):
    """The model and the tokenizer in a folder of transformers.

    config     block_size and vocab_size of the model
    tokenizer  the folder's tokenizer
    Raises FileNotFoundError, or ValueError with one line that says what is wrong with the folder.
    """

    def __init__(self, folder):
        super().__init__()
        try:
            import transformers
        except ImportError:
            raise ValueError("transformers is not installed: pip install transformers") from None
        if not Path(folder, "config.json").is_file():
            raise FileNotFoundError(
                f"no model of transformers at {folder}, because config.json is missing: name its folder with --ckpt"
            )
        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        options = dict(local_files_only=True, trust_remote_code=False)  # a model that needs code of its own is refused
        try:
            check_folder(folder)
            read = transformers.AutoModelForCausalLM.from_pretrained
            self.hf, found = read(folder, output_loading_info=True, **options)
            if found["missing_keys"]:  # transformers fills them with random numbers
                raise ValueError(f"its weights lack {min(found['missing_keys'])}")
            self.hf.float().eval()
            theirs = transformers.AutoTokenizer.from_pretrained(folder, **options)
            self.tokenizer = tokenizer_from_json(theirs.backend_tokenizer.to_str())
        except Exception as error:  # a damaged folder can raise nearly anything
            raise ValueError(f"{folder} cannot be read: {first_line(error)[:200]}") from None
        check_finite(self.hf, folder)
        with torch.no_grad():
            output = self.hf(input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=True)
        if getattr(output, "past_key_values", None) is None:
            name = type(self.hf).__name__
            raise ValueError(f"{folder} has no cache that we could use: {name} returns no past_key_values")
        settings = self.hf.config.get_text_config()
        limits = (getattr(settings, name, None) for name in ("max_position_embeddings", "max_seq_len"))
        self.config = SimpleNamespace(
            block_size=next(filter(None, limits), 2048),  # Bloom and its like name no limit
            vocab_size=self.hf.get_output_embeddings().weight.size(0),
        )

    def forward(self, idx):
        """Return the logits `(B, T, V)` of idx `(B, T)`, computed without a cache, and None: see GPT.forward."""
        return self.hf(input_ids=idx, attention_mask=torch.ones_like(idx), use_cache=False).logits, None

    def new_cache(self, batch_size):
        return SimpleNamespace(past=None, length=0)

    @torch.inference_mode()
    def next_logits(self, idx, cache=None):
        """Return the logits `(B, V)` of the token after idx `(B, T)`, which is appended to the cache: see GPT."""
        (B, T), held = idx.shape, cache.length if cache else 0
        with eval_mode(self):
            output = self.hf(
                input_ids=idx,
                attention_mask=torch.ones(B, held + T, dtype=torch.int64),
                past_key_values=cache.past if cache else None,
                use_cache=cache is not None,
            )
        if cache:
            cache.past, cache.length = output.past_key_values, held + T
        return output.logits[:, -1]
