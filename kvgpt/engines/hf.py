"""Any causal language model of transformers behind the loop and the sampler of this kit: sample.py --engine hf."""

from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

from kvgpt.checkpoint import check_finite, first_line
from kvgpt.decoding.sampling import Sampling
from kvgpt.files import check_folder
from model import decode_tokens, eval_mode


class HuggingFaceGPT(nn.Module):
    """The model and the tokenizer in a folder of transformers.

    config     block_size and vocab_size of the model
    tokenizer  the folder's tokenizer
    past       the cache of transformers after the last cached step; None without one
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
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
        except Exception as error:  # a damaged folder can raise nearly anything
            raise ValueError(f"{folder} cannot be read: {first_line(error)[:200]}") from None
        check_finite(self.hf, folder)
        settings = self.hf.config.get_text_config()
        self.config = SimpleNamespace(
            block_size=getattr(settings, "max_position_embeddings", None) or 2048,  # Bloom and its like name no limit
            vocab_size=self.hf.get_output_embeddings().weight.size(0),
        )
        self.past = None

    def forward(self, idx):
        """Return the logits `(B, T, V)` of idx `(B, T)`, computed without a cache, and None: see GPT.forward."""
        return self.hf(input_ids=idx, attention_mask=torch.ones_like(idx), use_cache=False).logits, None

    def next_logits(self, kv_cache):
        """Return the function that decode_tokens calls at every step. With kv_cache it leaves its cache in `past`."""
        past_length = 0

        def logits_after(tokens, start, end):
            nonlocal past_length
            context = tokens[:, start:end]
            # We feed the newest token if the cache holds all others. It does not at first, and after a slide.
            decodes = kv_cache and self.past is not None and past_length == end - 1 - start
            with torch.inference_mode(), eval_mode(self):
                output = self.hf(
                    input_ids=context[:, -1:] if decodes else context,
                    attention_mask=torch.ones_like(context),
                    past_key_values=self.past if decodes else None,
                    use_cache=kv_cache,
                )
            if kv_cache:
                self.past, past_length = output.past_key_values, end - start
            return output.logits[:, -1]

        return logits_after

    def stream(self, idx, max_new_tokens, *, kv_cache=True, **sampling):
        """Yield the new tokens, a block `(B, 1)` per step. The arguments are those of GPT.stream."""
        sampling = Sampling(**sampling)
        return decode_tokens(self.next_logits(kv_cache), self.config, idx, max_new_tokens, sampling)

    def generate(self, idx, max_new_tokens, *, kv_cache=True, **sampling):
        """Return idx `(B, T)` and its continuation. The arguments are those of GPT.generate."""
        return torch.cat((idx, *self.stream(idx, max_new_tokens, kv_cache=kv_cache, **sampling)), dim=1)

    def cache_bytes(self):
        """Return (used, reserved) bytes of the cache. They are equal: we count whole tensors, however full they are."""
        layers = getattr(self.past, "layers", ())
        used = sum(t.nbytes for layer in layers for t in vars(layer).values() if isinstance(t, torch.Tensor))
        return used, used
