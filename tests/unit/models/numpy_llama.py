"""Llama in NumPy, float64, written from the papers and not from the code under test: an oracle for logits and gradients."""

from __future__ import annotations

import numpy as np

Weights = dict[str, np.ndarray]


def logits(weights: Weights, ids: np.ndarray, heads: int, theta: float) -> np.ndarray:
    """ids [b, s] → logits [b, s, V]; weights with query, key, value, gate and up apart."""
    b, s = ids.shape
    x = weights["embedding.word.weight"][ids]
    d = x.shape[-1] // heads
    # a pair of dims (i, i + d/2) is a complex number, which position p turns by p·θ^(−2i/d)
    turns = np.exp(1j * np.arange(s)[:, None] * theta ** (-np.arange(d // 2) * 2.0 / d))

    def by_heads(y):  # [b, n, s, d]
        return y.reshape(b, s, -1, d).swapaxes(1, 2)

    def turned(y):
        z = (y[..., : d // 2] + 1j * y[..., d // 2 :]) * turns
        return np.concatenate([z.real, z.imag], -1)

    number = 0
    while f"blocks.{number}.norm1.weight" in weights:
        w = {name: weights[f"blocks.{number}.{name}.weight"] for name in NAMES}
        y = norm(x, w["norm1"])
        q, k, v = (by_heads(y @ w[f"attention.{part}"]) for part in "qkv")
        q, k = turned(q), turned(k)
        mixed = np.empty_like(q)
        for head in range(heads):
            shared = head * k.shape[1] // heads  # neighbouring query heads share a head of keys and values
            scores = q[:, head] @ k[:, shared].swapaxes(-1, -2) / np.sqrt(d)
            scores = np.exp(np.where(np.tril(np.ones((s, s), bool)), scores, -np.inf))
            mixed[:, head] = scores / scores.sum(-1, keepdims=True) @ v[:, shared]
        x = x + mixed.swapaxes(1, 2).reshape(b, s, -1) @ w["attention.out"]
        y = norm(x, w["norm2"])
        gate = y @ w["mlp.gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (y @ w["mlp.up"])) @ w["mlp.down"]
        number += 1
    return norm(x, weights["norm.weight"]) @ weights.get("head.weight", weights["embedding.word.weight"]).T


def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weight


def split_fused(fused: Weights, groups: int, shared: int) -> Weights:
    """`…qkv…`, last dim [groups, (shared query heads, key, value) · d], and `…gate_up…`, last dim [gate, up], → apart."""
    weights: Weights = {}
    for name, weight in fused.items():
        if ".qkv." in name:
            parts = weight.reshape(weight.shape[0], groups, shared + 2, -1)
            for part, places in (("q", slice(shared)), ("k", [shared]), ("v", [shared + 1])):
                weights[name.replace(".qkv.", f".{part}.")] = parts[:, :, places].reshape(len(weight), -1).copy()
        elif ".gate_up." in name:
            gate, up = np.split(weight, 2, axis=-1)
            weights |= {name.replace("gate_up", "gate"): gate.copy(), name.replace("gate_up", "up"): up.copy()}
        else:
            weights[name] = weight
    return weights


NAMES = (
    "norm1", "attention.q", "attention.k", "attention.v", "attention.out", "norm2", "mlp.gate", "mlp.up", "mlp.down"
)  # fmt: skip
