"""What sample.py generates with for --draft, --compile and several prompts."""

import torch

from extras.cli import note
from extras.decoding.compile import CompileError, NotHereError
from extras.decoding.decoder import Decoder, filters_beyond_c
from extras.decoding.static import CompiledGPT
from model import stream_tokens


def choose_stream(model, prompts, num_new, sampling, ended, *, draft, ngrams, compile, weights, threads):
    """Return a Generation, or where the C backend cannot run, perhaps the plain loop with torch.compile.

    A note on stderr says what the C backend could not do.
    prompts, num_new, sampling, ended  those of Generation
    draft, ngrams, compile, weights    those of Decoder
    threads                            how many torch shall use; the C backend has its own
    """
    if compile:
        try:
            if names := filters_beyond_c(sampling):
                raise CompileError(f"step.c has no {' and no '.join(names)}")
            decoder = Decoder(model, draft, ngrams, compile=True, weights=weights)
            torch.set_num_threads(1)
            return decoder.generation(prompts, num_new, sampling, ended)
        except CompileError as error:
            torch.set_num_threads(threads)
            one_length = len({len(prompt) for prompt in prompts}) == 1
            if isinstance(error, NotHereError) and not draft and one_length:
                note(f"{error}: compiling with torch.compile instead, which can take a minute")
                try:
                    return stream_tokens(CompiledGPT(model, len(prompts)), torch.stack(prompts), num_new, sampling)
                except RuntimeError as failed:
                    error = failed
            note(f"{error}: decoding without --compile")
    torch.set_num_threads(threads)
    return Decoder(model, draft, ngrams).generation(prompts, num_new, sampling, ended)
