"""GPT in NumPy, float64, written from the papers and not from the code under test: an oracle for logits and gradients."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Weights = dict[str, np.ndarray]


def logits(weights: Weights, ids: np.ndarray, heads: int) -> np.ndarray:
    """ids [b, s] → logits [b, s, V]; split query/key/value weights."""
    b, s = ids.shape
    x = weights["embedding.word.weight"][ids] + weights["embedding.position.weight"][:s]
    number = 0
    while f"blocks.{number}.norm1.weight" in weights:
        block = {
            name.removeprefix(f"blocks.{number}."): w
            for name, w in weights.items()
            if name.startswith(f"blocks.{number}.")
        }
        y = _norm(x, block, "norm1")
        q, k, v = (_heads(_linear(y, block, f"attention.{part}"), heads) for part in ("q", "k", "v"))
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        scores = np.where(np.tril(np.ones((s, s), bool)), scores, -np.inf)
        mixed = _softmax(scores) @ v  # [b, n, s, d]
        x = x + _linear(mixed.swapaxes(1, 2).reshape(b, s, -1), block, "attention.out")
        x = x + _linear(_gelu(_linear(_norm(x, block, "norm2"), block, "mlp.up")), block, "mlp.down")
        number += 1
    return _norm(x, weights, "norm") @ weights["embedding.word.weight"].T


def loss(weights: Weights, ids: np.ndarray, labels: np.ndarray, mask: np.ndarray, heads: int, vocab_size: int) -> float:
    """Mean of −log p(label) over the unmasked places, the softmax taken over the true vocabulary only."""
    return mean_loss(logits(weights, ids, heads)[..., :vocab_size], labels, mask)


def mean_loss(logits: np.ndarray, labels: np.ndarray, mask: np.ndarray) -> float:
    """Mean of −log softmax(logits)[label] over the unmasked places."""
    picked = np.take_along_axis(_softmax(logits), labels[..., None], -1)[..., 0]
    return float((-np.log(picked) * mask).sum() / mask.sum())


def gradients(loss: Callable[[Weights], float], weights: Weights) -> Weights:
    """Central differences of `loss` in every element (error about 1e-9 in float64)."""
    step, found = 1e-5, {}
    for name, weight in weights.items():
        gradient = np.zeros_like(weight)
        for index in np.ndindex(weight.shape):
            kept = weight[index]
            sides = []
            for moved in (kept + step, kept - step):
                weight[index] = moved
                sides.append(loss(weights))
            weight[index] = kept
            gradient[index] = (sides[0] - sides[1]) / (2 * step)
        found[name] = gradient
    return found


def split_fused(fused: Weights, heads: int) -> Weights:
    """`…qkv.…` with last dim [heads, 3, size] → `…q.…`, `…k.…`, `…v.…`."""
    weights: Weights = {}
    for name, weight in fused.items():
        if ".qkv." not in name:
            weights[name] = weight
            continue
        parts = weight.reshape(*weight.shape[:-1], heads, 3, -1)
        for position, part in enumerate(("q", "k", "v")):
            weights[name.replace(".qkv.", f".{part}.")] = parts[..., position, :].reshape(*weight.shape[:-1], -1).copy()
    return weights


def _linear(x: np.ndarray, weights: Weights, path: str) -> np.ndarray:
    return x @ weights[f"{path}.weight"] + weights[f"{path}.bias"]


def _norm(x: np.ndarray, weights: Weights, path: str) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return (
        centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * weights[f"{path}.weight"]
        + weights[f"{path}.bias"]
    )


def _heads(x: np.ndarray, heads: int) -> np.ndarray:
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def _gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)
