"""What sample.py generates with for --draft, --compile and several prompts."""

import torch

from extras.cli import note
from extras.decoding.compile import CompileError, NotHereError
from extras.decoding.decoder import Decoder
from extras.decoding.static import CompiledGPT


def choose_decoder(model, draft, ngrams, compile, weights, num_prompts, num_samples, threads):
    """Return (decoder, model) to generate with: a Decoder, or None and a model for the plain loop, stream_tokens.

    Where the C backend cannot run we try torch.compile, and then do without. A note on stderr says so.

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
