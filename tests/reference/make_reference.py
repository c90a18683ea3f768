"""Reference gradients of MiniGPT by PyTorch's autograd: `python tests/reference/make_reference.py` writes the file.

The model is written down here once more, from PyTorch's own functions and with its own list of parameters, so that it
shares nothing with the package but the names. Run it again only when the model itself changes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

FILE = Path(__file__).with_name("minigpt_gradients.npz")
SIZES = {"n_layer": 2, "n_embd": 15, "n_head": 3, "vocab_size": 57, "seq_len": 7}
BATCH = 3


def shapes(n_layer: int, n_embd: int, n_head: int, vocab_size: int, seq_len: int) -> dict[str, tuple[int, ...]]:
    """Name -> shape, in flat order."""
    d = n_embd
    block = {
        "ln1.weight": (d,),
        "ln1.bias": (d,),
        "qkv.weight": (3 * d, d),
        "qkv.bias": (3 * d,),
        "attn_proj.weight": (d, d),
        "attn_proj.bias": (d,),
        "ln2.weight": (d,),
        "ln2.bias": (d,),
        "fc.weight": (4 * d, d),
        "fc.bias": (4 * d,),
        "mlp_proj.weight": (4 * d, d),
        "mlp_proj.bias": (d,),
    }
    blocks = {f"blocks.{i}.{name}": shape for i in range(n_layer) for name, shape in block.items()}
    embeddings = {"wte.weight": (vocab_size, d), "wpe.weight": (seq_len, d)}
    return embeddings | blocks | {"ln_f.weight": (d,), "ln_f.bias": (d,), "head.weight": (vocab_size, d)}


def random_parameters(sizes: dict[str, int], seed: int) -> np.ndarray:
    """[P] float32 that exercise every parameter: no zero biases, no gains of one."""
    rng = np.random.default_rng(seed)
    parts = []
    for name, shape in shapes(**sizes).items():
        gain = name.endswith(("ln1.weight", "ln2.weight", "ln_f.weight"))
        parts.append(rng.normal(1.0 if gain else 0.0, 0.2, shape).ravel())
    return np.concatenate(parts).astype(np.float32)


def loss_and_gradients(
    sizes: dict[str, int], params: np.ndarray, tokens: np.ndarray, targets: np.ndarray, dtype: torch.dtype
) -> tuple[float, np.ndarray]:
    """Loss summed over tokens and its gradient [P] at the flat `params`, computed in `dtype`."""
    named, start = {}, 0
    for name, shape in shapes(**sizes).items():
        part = params[start : start + int(np.prod(shape))].reshape(shape)
        named[name] = torch.tensor(part, dtype=dtype, requires_grad=True)
        start += part.size
    loss = _loss(sizes, named, torch.tensor(tokens), torch.tensor(targets))
    loss.backward()
    return loss.item(), np.concatenate([parameter.grad.numpy().ravel() for parameter in named.values()])


def _loss(sizes, named, tokens, targets):
    b, t = tokens.shape
    d, heads = sizes["n_embd"], sizes["n_head"]
    x = functional.embedding(tokens, named["wte.weight"]) + named["wpe.weight"]
    for i in range(sizes["n_layer"]):
        p = {name.removeprefix(f"blocks.{i}."): value for name, value in named.items()}
        h = functional.layer_norm(x, (d,), p["ln1.weight"], p["ln1.bias"], eps=1e-5)
        qkv = functional.linear(h, p["qkv.weight"], p["qkv.bias"]).view(b, t, heads, 3, d // heads)
        q, k, v = (qkv[:, :, :, j].transpose(1, 2) for j in range(3))
        z = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + functional.linear(z, p["attn_proj.weight"].T, p["attn_proj.bias"])
        h = functional.layer_norm(x, (d,), p["ln2.weight"], p["ln2.bias"], eps=1e-5)
        h = functional.gelu(functional.linear(h, p["fc.weight"], p["fc.bias"]), approximate="tanh")
        x = x + functional.linear(h, p["mlp_proj.weight"].T, p["mlp_proj.bias"])
    x = functional.layer_norm(x, (d,), named["ln_f.weight"], named["ln_f.bias"], eps=1e-5)
    logits = functional.linear(x, named["head.weight"])
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def main() -> None:
    params = random_parameters(SIZES, seed=20)
    tokens, targets = np.random.default_rng(21).integers(0, SIZES["vocab_size"], (2, BATCH, SIZES["seq_len"]))
    loss, grads = loss_and_gradients(SIZES, params, tokens, targets, torch.float64)
    np.savez(FILE, **SIZES, params=params, tokens=tokens, targets=targets, loss=loss, grads=grads)
    print(f"{FILE}: {len(params)} parameters, loss {loss}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
