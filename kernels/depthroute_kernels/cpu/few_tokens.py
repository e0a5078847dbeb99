# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The depth reads of a few tokens without gradients, as in decoding: there, what costs is the number of calls.

Inside, n stands for all tokens (B·T), d for D/H, and G for independent groups of queries and sources (DAR's two streams).
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def of_few_tokens(tensor: Tensor) -> bool:
    """Whether the calls cost more than the arithmetic, for a source [..., D], and no gradient is wanted. Not under autocast,
    whose suspension would be one more call around every read."""
    return tensor.numel() <= 2**14 and not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


class FewTokens:
    """The sources of one forward pass as they come, and the logits that all queries give to each: a source is looked at once,
    and a read is one softmax and one product.

    Args:
        queries: folded queries [G, M, D], float32 (float64).
        source: a tensor of the sources' shape [..., D].
        eps: inside the root.
        num_heads: H.
        anchored: mix with p − p⁰.

    Attributes:
        count: how many sources have been added for good.
    """

    def __init__(self, queries: Tensor, source: Tensor, *, eps: float, num_heads: int = 1, anchored: bool = False):
        self.groups, reads, width = queries.shape
        self.shape, self.dtype, self.heads, self.anchored = source.shape, queries.dtype, num_heads, anchored
        self.width = width
        self.tokens = source.numel() // width
        # what has the shape of a batched product's row as it is needs no view
        self.is_row = source.dim() == 3 and source.shape[1] == 1
        # sqrt(D · (mean(k²) + eps)) in two calls, so that queries are sqrt(D) times as long
        self.floor = queries.new_full((), (width * eps) ** 0.5)
        self.queries = (queries * width**0.5).view(self.groups, 1, 1, reads, num_heads, width // num_heads)
        self.values: Tensor | None = None
        self.logits: Tensor | None = None
        self.count = 0
        self.ready: dict[int, Tensor] = {}

    def add(self, values: Sequence[Sequence[Tensor]], keys: Sequence[Sequence[Tensor]] | None = None) -> None:
        """More sources: by group a list of tensors [..., D], and of their keys where those are other tensors."""
        self.values, self.logits = self._with(values, keys)
        self.count += len(values[0])
        self.ready.clear()

    def _with(
        self, values: Sequence[Sequence[Tensor]], keys: Sequence[Sequence[Tensor]] | None
    ) -> tuple[Tensor, Tensor]:
        """Values [G·n, S, D] and logits [G·n, S, M·H] of all sources, with these behind."""
        new = self._rows(values)
        key = new if keys is None else self._rows(keys)
        norms = torch.hypot(torch.linalg.vector_norm(key, dim=-1, keepdim=True), self.floor)
        # not as a matrix product, whose rounding depends on a query's place: equal queries have equal logits
        by_head = key.view(self.groups, self.tokens, key.shape[1], 1, self.heads, self.width // self.heads)
        logits = (by_head * self.queries).sum(-1).view(*key.shape[:2], self.queries.shape[3] * self.heads).div_(norms)
        if self.values is None or self.logits is None:
            return new, logits
        return torch.cat((self.values, new), 1), torch.cat((self.logits, logits), 1)

    def _rows(self, sources: Sequence[Sequence[Tensor]]) -> Tensor:
        """[G·n, sources, D] in the dtype of the statistics."""
        rows = []
        for of_group in sources:
            of_group = of_group if self.is_row else [source.reshape(self.tokens, 1, self.width) for source in of_group]
            rows.append(of_group[0] if len(of_group) == 1 else torch.cat(tuple(of_group), 1))
        row = rows[0] if self.groups == 1 else torch.cat(rows)
        return row if row.dtype == self.dtype else row.to(self.dtype)

    def read(
        self,
        first: int,
        count: int = 1,
        ahead: int = 0,
        values: Sequence[Sequence[Tensor]] | None = None,
        keys: Sequence[Sequence[Tensor]] | None = None,
        bias: Tensor | None = None,
        prior_bias: Tensor | None = None,
        gain: float = 1.0,
    ) -> tuple[list[Tensor], Tensor | None]:
        """The queries `first` … `first + count` over all sources, and over private ones that no other read has.

        Args:
            ahead: how many more queries behind them have the same sources, bias and gain, and none of their own: their mixes
                are made at the same time, and kept until they are asked for. One group only.
            values, keys: private sources, as in `add`.
            bias: b [S, count]; None: zeros.
            prior_bias: b⁰ [S]; None: zeros. Used only where anchored.
            gain: of the mix.

        Returns:
            gain · Σ w v [..., D] of each, group by group, and logits [G·n, S, count·H], float32 (float64); no logits with
            reads ahead, or of those.
        """
        if first in self.ready:
            return [self.ready[first + index] for index in range(count)], None
        sources, logits = (self.values, self.logits) if values is None else self._with(values, keys)
        assert sources is not None and logits is not None
        reads = count + ahead
        logits = logits.narrow(2, first * self.heads, reads * self.heads)
        if bias is not None:
            logits = logits + (bias if self.heads == 1 else bias.repeat_interleave(self.heads, 1))
        weights = torch.softmax(logits, 1)
        if self.anchored:
            # of the whole shape and layout: only then is p − p⁰ exactly zero at the start
            initial = torch.zeros_like(logits)
            weights -= torch.softmax(initial if prior_bias is None else initial + prior_bias.unsqueeze(-1), 1)
        if gain != 1:
            weights *= gain
        if self.heads == 1:
            mixes = torch.bmm(weights.mT, sources)  # [G·n, reads, D]
        else:
            by_head = sources.unflatten(-1, (1, self.heads, self.width // self.heads)) * weights.unflatten(
                -1, (reads, self.heads, 1)
            )
            mixes = by_head.sum(1).flatten(-2)
        found = [mixes] if self.groups * reads == 1 else self._by_read(mixes)
        if not self.is_row:
            found = [mix.reshape(self.shape) for mix in found]
        if not ahead:
            return found, logits
        self.ready = dict(enumerate(found, first))
        return found[:count], None

    def _by_read(self, mixes: Tensor) -> list[Tensor]:
        of_groups = mixes.chunk(self.groups) if self.groups > 1 else (mixes,)
        return [mix for of_group in of_groups for mix in of_group.split(1, 1)]

    def totals(self, values: Sequence[Sequence[Tensor]] | None = None) -> Sequence[Tensor]:
        """Σ v [..., D] of every group, with private sources where given."""
        assert self.values is not None
        rows = self.values if values is None else torch.cat((self.values, self._rows(values)), 1)
        return [total.reshape(self.shape) for total in rows.sum(1).chunk(self.groups)]

    def weights(self, logits: Tensor) -> Tensor:
        """p [G, count, S, ..., H] of a read's logits."""
        size, reads = logits.shape[1], logits.shape[2] // self.heads
        weights = torch.softmax(logits, 1).view(self.groups, self.tokens, size, reads, self.heads)
        return weights.permute(0, 3, 2, 1, 4).reshape(self.groups, reads, size, *self.shape[:-1], self.heads)
