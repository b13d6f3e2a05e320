"""What sample.py generates with for --draft, --compile and several prompts."""

import torch

from kvgpt.cli import note
from kvgpt.decoding.compile import CompileError, NotHereError
from kvgpt.decoding.decoder import Decoder
from kvgpt.decoding.static import CompiledGPT


def choose_decoder(model, draft, ngrams, compile, weights, num_prompts, num_samples, threads):
    """Return (decoder, model): a Decoder, or None and a model for stream_tokens, if a plain loop is what is left.

    Without the C backend, torch.compile is next, and then neither; a note on stderr says so.
    draft, ngrams, compile, weights  those of Decoder
    num_samples                      rows per prompt
    threads                          how many torch will use, because torch.compile compiles for that number
    """
    if compile:
        try:
            return Decoder(model, draft, ngrams, compile=True, weights=weights), model
        except CompileError as error:
            if isinstance(error, NotHereError) and not draft and num_prompts == 1:
                note(f"{error}: compiling with torch.compile instead, which can take a minute")
                torch.set_num_threads(threads)
                try:
                    return None, CompiledGPT(model, num_samples)
                except RuntimeError as failed:
                    error = failed
            note(f"{error}: decoding without --compile")
    return Decoder(model, draft, ngrams) if draft or num_prompts > 1 else None, model
