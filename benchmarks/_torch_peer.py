"""The peer of the training step: MiniGPT in PyTorch, trained by DistributedDataParallel + ZeroRedundancyOptimizer.

Written independently of ours, from PyTorch's own layers; only names and initial values of the parameters are shared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

from mpi_ckpt.model.config import ModelConfig

# Every switch of the two classes that speeds up this model: parameters and gradients live in the communication's own
# buckets, the graph is promised not to change, and AdamW is one fused loop.
TUNED_DDP: dict[str, Any] = {"gradient_as_bucket_view": True, "static_graph": True}
TUNED_ZERO: dict[str, Any] = {"parameters_as_bucket_view": True, "fused": True}


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d, self.heads = config.n_embd, config.n_head
        self.ln1, self.qkv, self.attn_proj = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.ln2, self.fc, self.mlp_proj = nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, self.heads, 3, d // self.heads).permute(3, 0, 2, 1, 4)
        z = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_proj(z.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp_proj(gelu(self.fc(self.ln2(x)), approximate="tanh"))


class GPT(nn.Module):
    """Pre-LayerNorm decoder in float32, separate head, learned positions: tokens [b, T] -> logits [b, T, vocab]."""

    def __init__(self, config: ModelConfig, flat: np.ndarray) -> None:
        super().__init__()
        d = config.n_embd
        self.wte, self.wpe = nn.Embedding(config.vocab_size, d), nn.Embedding(config.seq_len, d)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f, self.head = nn.LayerNorm(d), nn.Linear(d, config.vocab_size, bias=False)
        self._copy(config, flat)

    def _copy(self, config: ModelConfig, flat: np.ndarray) -> None:
        """Take our parameters by name. We store the projections (in, out); nn.Linear keeps every weight (out, in)."""
        ours = {p.name: flat[p.start : p.stop].reshape(p.shape) for p in config.parameters()}
        swapped = ("attn_proj.weight", "mlp_proj.weight")
        self.load_state_dict({k: torch.from_numpy((a.T if k.endswith(swapped) else a).copy()) for k, a in ours.items()})

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


def join_gloo(comm: MPI.Comm) -> None:
    """**Collective.** PyTorch's process group over the ranks of `comm`; they meet at a free port of rank 0."""
    here, n, store = "127.0.0.1", comm.size, None
    if comm.rank == 0:
        store = dist.TCPStore(here, 0, n, is_master=True, wait_for_workers=False)
    port = comm.bcast(store.port if store else None)
    dist.init_process_group("gloo", store=store or dist.TCPStore(here, port, n), rank=comm.rank, world_size=n)


def torch_step(
    config: ModelConfig,
    flat: np.ndarray,
    batch: Callable[[int], tuple[np.ndarray, np.ndarray]],
    adamw: dict[str, Any],
    *,
    tuned: bool,
) -> Callable[[int], float]:
    """**Collective.** A function that takes one step from `batch(number)` and returns this rank's mean loss.

    `flat` [P] are the initial parameters, `adamw` the arguments of torch.optim.AdamW. `tuned`: with every switch that
    helps; else as the two classes are by default. DDP averages the gradients; ZeRO updates shards and broadcasts them.
    """
    torch.set_num_threads(1)
    model = GPT(config, flat)
    replica = DistributedDataParallel(model, **(TUNED_DDP if tuned else {}))
    options = adamw | (TUNED_ZERO if tuned else {})
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, **options)

    def step(number: int) -> float:
        tokens, targets = map(torch.from_numpy, batch(number))
        optimizer.zero_grad()
        loss = cross_entropy(replica(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        return loss.item()

    return step
