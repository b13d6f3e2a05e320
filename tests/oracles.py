"""What the model must compute, written out plainly: no batch, no cache, no library call that hides the mathematics.

Nothing here imports our own code, and all of it is in float64.
"""

import math

import torch


def layer_norm(x, weight=None, bias=None):
    centred = x - x.mean(-1, keepdim=True)
    x = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def gelu(x, tanh):
    if tanh:
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def softmax(x):
    e = (x - x.max(-1, keepdim=True).values).exp()
    return e / e.sum(-1, keepdim=True)


def turned(x, positions=None):
    """Rotary embedding of x (T, head_size), one position and one pair of coordinates at a time."""
    T, size = x.shape
    out = torch.empty_like(x)
    for t, position in enumerate(range(T) if positions is None else positions):
        for i in range(size // 2):
            angle = position * 10000.0 ** (-2 * i / size)
            a, b = x[t, i], x[t, i + size // 2]
            out[t, i] = a * math.cos(angle) - b * math.sin(angle)
            out[t, i + size // 2] = a * math.sin(angle) + b * math.cos(angle)
    return out


def per_head_logits(state, args, ids, positions=None, allowed=None):
    """(T, vocab_size) logits of one sequence, by a loop over layers and heads under a triangular mask.

    `state` is a state_dict with nanoGPT's key names, `args` the model_args that go with it. The tokens stand at
    `positions` (default: 0 to T - 1), and token i sees token j where `allowed` (T, T) says so (default: j <= i).
    """
    state = {key: value.double() for key, value in state.items()}
    n_head, C, T = args["n_head"], args["n_embd"], len(ids)
    n_kv_head = args.get("n_kv_head") or n_head
    size = C // n_head
    rope, tanh = args.get("pos_emb", "learned") == "rope", args.get("activation", "gelu") == "gelu_tanh"
    norm_first = args.get("norm_first", True)
    positions = list(range(T) if positions is None else positions)
    allowed = torch.tril(torch.ones(T, T)) == 1 if allowed is None else allowed

    def linear(x, name):
        y = x @ state[f"{name}.weight"].T
        return y + state[f"{name}.bias"] if f"{name}.bias" in state else y

    def norm(x, name):
        return layer_norm(x, state[f"{name}.weight"], state.get(f"{name}.bias"))

    def attention(x, name):
        q, k, v = linear(x, f"{name}.c_attn").split([C, n_kv_head * size, n_kv_head * size], dim=1)
        outputs = []
        for head in range(n_head):
            group = head // (n_head // n_kv_head)  # the key/value head that serves this query head
            q_h = q[:, head * size : (head + 1) * size]
            k_h, v_h = (z[:, group * size : (group + 1) * size] for z in (k, v))
            if args.get("qk_norm"):
                q_h, k_h = norm(q_h, f"{name}.q_norm"), norm(k_h, f"{name}.k_norm")
            if rope:
                q_h, k_h = turned(q_h, positions), turned(k_h, positions)
            scores = q_h @ k_h.T / math.sqrt(size)
            scores[~allowed] = -math.inf
            outputs.append(softmax(scores) @ v_h)
        return linear(torch.cat(outputs, dim=1), f"{name}.c_proj")

    def mlp(x, name):
        if args.get("activation") == "swiglu":
            gate, up = linear(x, f"{name}.c_fc").chunk(2, dim=1)
            return linear(gate / (1 + torch.exp(-gate)) * up, f"{name}.c_proj")
        return linear(gelu(linear(x, f"{name}.c_fc"), tanh), f"{name}.c_proj")

    x = state["transformer.wte.weight"][list(ids)]
    if not rope:
        x = x + state["transformer.wpe.weight"][positions]
    for i in range(args["n_layer"]):
        block = f"transformer.h.{i}"
        if norm_first:
            x = x + attention(norm(x, f"{block}.ln_1"), f"{block}.attn")
            x = x + mlp(norm(x, f"{block}.ln_2"), f"{block}.mlp")
        else:
            x = norm(x + attention(x, f"{block}.attn"), f"{block}.ln_1")
            x = norm(x + mlp(x, f"{block}.mlp"), f"{block}.ln_2")
    if norm_first:
        x = norm(x, "transformer.ln_f")
    return x @ state["lm_head.weight"].T
