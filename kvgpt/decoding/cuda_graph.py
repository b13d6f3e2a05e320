"""The compiled step on CUDA: decode_step through torch.compile, replayed as a CUDA graph."""

import torch

from kvgpt.decoding.speculate import DecodeState, decode_step
from model import eval_mode


class StepModule(torch.nn.Module):
    """decode_step as a module. Everything that a step writes is an input."""

    def __init__(self, model, num_drafts):
        super().__init__()
        self.model = model
        self.num_drafts = num_drafts

    def forward(self, state, table, buffers):
        for cache, key, value in zip(self.model.caches, buffers[::2], buffers[1::2]):
            cache.key, cache.value = key, value
        decode_step(self.model, DecodeState(*state), self.num_drafts, table)


def graph_step(model, num_drafts, table):
    """Return bind(state), which returns run(max_steps) like compile_step. A run makes one step.

    A graph serves all states with the same number of rows that have the same filters, at any values.
    """
    graphs = {}

    def bind(state):
        for block in model.transformer["h"]:
            block.attn.allocate_cache(len(state.end))
        shape = len(state.end), state.top_k is None, state.top_p is None
        if shape not in graphs:
            buffers = [tensor for cache in model.caches for tensor in (cache.key, cache.value)]
            with eval_mode(model):
                fields = list(vars(state).values())
                graph, own, program = capture(StepModule(model, num_drafts), fields, table, buffers)
            graphs[shape] = graph, own, buffers, program  # the graph reads constants of the program
        graph, own, buffers, _ = graphs[shape]
        for cache, key, value in zip(model.caches, buffers[::2], buffers[1::2]):
            cache.clear()
            cache.key, cache.value = key, value
        pairs = [pair for pair in zip(own, vars(state).values()) if pair[0] is not None]

        def run(max_steps):
            before = state.end.tolist()
            for mine, theirs in pairs:
                mine.copy_(theirs)
            graph.replay()
            for mine, theirs in pairs[:3]:  # tokens, end, cached
                theirs.copy_(mine)
            new = [end - begin for begin, end in zip(before, state.end.tolist()) if end > begin]
            return 1, num_drafts * len(new), sum(new) - len(new)

        return run

    return bind


@torch.no_grad()
def capture(step, fields, table, buffers):
    """Compile a StepModule and capture it as a graph.

    Returns the graph, the fields that it reads and writes, and the compiled program.
    """
    own = [x if x is None else x.clone() for x in fields]
    step = torch.compile(step, fullgraph=True, dynamic=False)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # compile and warm up, because a capture allows no compilation and no lazy initialization
            step(own, table, buffers)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(own, table, buffers)
    return graph, own, step
