"""What a parameter is, whatever the layout: one description for initialisation, checkpoints, decay, planning and parity."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """A logical parameter.

    Attributes:
        name: layout-free name, `blocks.7.attention.qkv.weight`.
        shape: global shape, vocabulary padding included.
        mp_dim: the dim that tensor parallelism cuts, or None if every tensor rank holds all of it.
        decay: whether weight decay applies (matrices yes, vectors no).
        std: σ of its normal initial values; 0 for a constant.
        fill: the constant, where std is 0.
        rows: rows that mean something; further ones are vocabulary padding, zero at the start and excluded from fingerprints.
        parts: names of the matrices that lie interleaved in the last dim: `groups` times some columns of each in turn, so that
            cutting the last dim cuts each of them alike (query, key and value by heads); () for an ordinary parameter.
        groups: number of groups (attention heads, say) in the last dim of an interleaved parameter.
        shares: how the columns of a group are divided among the parts, such as 4 : 1 : 1; () for equal shares.
        tied_to: name of the parameter that this one is; it has no storage of its own.
        at_both_ends: another piece at the other end of the model is tied to it, so that the first and the last pipeline stage
            both hold it.
        is_lookup: rows are picked out of it; it is in no matrix product.
    """

    name: str
    shape: tuple[int, ...]
    mp_dim: int | None = None
    decay: bool = True
    std: float = 0.0
    fill: float = 0.0
    rows: int | None = None
    parts: tuple[str, ...] = ()
    groups: int = 1
    shares: tuple[int, ...] = ()
    tied_to: str | None = None
    at_both_ends: bool = False
    is_lookup: bool = False

    @property
    def size(self) -> int:
        """Elements of the global tensor; 0 if tied."""
        return 0 if self.tied_to else math.prod(self.shape)

    @property
    def part_widths(self) -> tuple[int, ...]:
        """Columns of each part in one group; of an ordinary parameter (all columns,)."""
        shares = self.shares or (1,) * max(len(self.parts), 1)
        unit = self.shape[-1] // self.groups // sum(shares)
        return tuple(share * unit for share in shares)

    def fused(self, parts: tuple[str, ...], groups: int, shares: tuple[int, ...] = ()) -> ParameterSpec:
        """This parameter as an interleaved one."""
        return replace(self, parts=parts, groups=groups, shares=shares)

    def box(self, mp_rank: int = 0, mp_size: int = 1) -> tuple[tuple[int, int], ...]:
        """The part that tensor rank `mp_rank` of `mp_size` holds: (start, stop) of each dim."""
        box = [(0, length) for length in self.shape]
        if self.mp_dim is not None:
            length, rest = divmod(self.shape[self.mp_dim], mp_size)
            assert rest == 0, f"{self.name}: {self.shape[self.mp_dim]} cannot be cut in {mp_size}"
            box[self.mp_dim] = (mp_rank * length, (mp_rank + 1) * length)
        return tuple(box)
