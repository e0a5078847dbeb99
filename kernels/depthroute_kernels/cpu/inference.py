# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The depth reads of a model's forward pass without gradients: a source is looked at once, when it comes, for all queries that are
still to be asked.

Inside, n stands for all tokens (B·T), d for D/H, G for groups of queries and sources (DAR's two streams), and C for the most
sources that any read has. In decoding what costs is the number of calls, with many tokens the bytes: both are least
so, and a product of one query's weights with the sources is no slower than its share of one for several.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


FEW = 2**14
"""Numbers in a source below which a call costs more than its arithmetic."""


def of_inference(tensor: Tensor) -> bool:
    """Whether no gradient is wanted. Not under autocast, whose suspension would be one more call around every read."""
    return not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


class InferenceReads:
    """The sources of one forward pass as they come, and the logits that all queries give to each. A read is one softmax and
    one product.

    Args:
        queries: folded queries [G, M, D], float32 (float64).
        source: a tensor of the sources' shape [..., D].
        capacity: C.
        eps: inside the root.
        num_heads: H.
        anchored: mix with p − p⁰.
        crossed: two groups, each of which has the other's values for keys.

    Attributes:
        count: how many sources have been added for good.
        is_small: whether calls cost more than their arithmetic: then all queries meet every source, and mixes are made ahead.
    """

    def __init__(
        self,
        queries: Tensor,
        source: Tensor,
        *,
        capacity: int,
        eps: float,
        num_heads: int = 1,
        anchored: bool = False,
        crossed: bool = False,
    ):
        groups, reads, width = queries.shape
        tokens, part = source.numel() // width, width // num_heads
        self.groups, self.tokens, self.heads, self.part, self.anchored = groups, tokens, num_heads, part, anchored
        self.shape, self.dtype, self.crossed, self.reads = source.shape, queries.dtype, crossed, reads
        self.is_small = source.numel() <= FEW
        # what has the shape of a product's row as it is needs no view
        self.is_row = groups == num_heads == 1 and source.dim() == 3 and source.shape[1] == 1
        # sqrt(D · (mean(k²) + eps)) in two calls, so that queries are sqrt(D) times as long
        self.floor = queries.new_full((), (width * eps) ** 0.5)
        # where keys are crossed logits lie where the keys are, in the other group's place
        by_head = (queries.flip(0) if crossed else queries).mul(width**0.5).view(groups, reads, num_heads, part)
        self.queries = by_head.permute(0, 2, 3, 1).reshape(groups * num_heads, part, reads)
        values = queries.new_empty(capacity, groups, tokens, width)
        # a batch of [C, d], a source's tokens lying together
        self.values = values.view(capacity, groups * tokens * num_heads, part).transpose(0, 1)
        self.rows = values.unbind(0)
        self.slots = values.view(capacity, *([groups] if groups > 1 else []), *source.shape).unbind(0)
        logits = queries.new_empty(groups * tokens, reads * num_heads, capacity)
        self.all_logits, self.logits = logits, logits.split(num_heads, 1)
        self.columns = logits.view(groups, tokens, reads * num_heads, capacity).unbind(3)
        self.count = self.asked = 0
        self.ready: dict[int, Tensor] = {}

    def add(self, values: Sequence[Sequence[Tensor]], keys: Sequence[Sequence[Tensor]] | None = None) -> None:
        """More sources: by group a list of tensors [..., D], and of their keys where those are other tensors."""
        self._put(values, keys, self.asked, self.reads - self.asked)
        self.count += len(values[0])
        self.ready.clear()

    def _put(
        self, values: Sequence[Sequence[Tensor]], keys: Sequence[Sequence[Tensor]] | None, first: int, count: int
    ) -> None:
        """Write sources behind those that are there for good, and the logits that `count` queries from `first` on, at least,
        give to them."""
        queries = self.queries
        if not self.is_small:
            queries = queries.narrow(2, first, count)
        for place, of_groups in enumerate(zip(*values), self.count):
            slot, key, column = self.slots[place], self.rows[place], self.columns[place]
            slot.copy_(of_groups[0]) if self.groups == 1 else torch.stack(of_groups, out=slot)
            if keys is not None:
                key = torch.stack([of_group[place - self.count] for of_group in keys]).to(self.dtype).view(key.shape)
            norms = torch.hypot(torch.linalg.vector_norm(key, dim=-1, keepdim=True), self.floor)
            if self.heads > 1:
                key = key.view(self.groups, self.tokens, self.heads, self.part).transpose(1, 2).flatten(0, 1)
            scores = torch.bmm(key, queries)  # [G·H, n, M]
            if self.heads > 1:
                of_heads = scores.view(self.groups, self.heads, *scores.shape[1:])
                scores = of_heads.permute(0, 2, 3, 1).flatten(2)
            if not self.is_small:
                column = column.narrow(2, first * self.heads, count * self.heads)
            torch.div(scores, norms, out=column)

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
        """The queries `first` … `first + count` over all sources, and over private ones that no other read has. Reads are asked for
        in the order of their queries: what comes later has no logits of queries before.

        Args:
            ahead: how many more queries behind them have the same sources, bias and gain, and none of their own: their mixes
                are made at the same time where tokens are few, and kept until they are asked for. One group only.
            values, keys: private sources, as in `add`.
            bias: b [count, S]; None: zeros.
            prior_bias: b⁰ [S]; None: zeros. Used only where anchored.
            gain: of the mix.

        Returns:
            gain · Σ w v [..., D] of each, group by group, and logits [G·n, count·H, S], float32 (float64), which the next
            private sources may overwrite; no logits with reads ahead, or of those.
        """
        if first in self.ready:
            return [self.ready[first + index] for index in range(count)], None
        assert first >= self.asked, (first, self.asked)
        self.asked = first
        size = self.count
        if values is not None:
            self._put(values, keys, first, count)
            size += len(values[0])
        ahead = ahead if self.is_small else 0
        reads = count + ahead
        if reads == 1:
            logits = self.logits[first]
        else:
            logits = self.all_logits.narrow(1, first * self.heads, reads * self.heads)
        logits = logits.narrow(2, 0, size)
        if self.crossed:
            logits = logits.roll(self.tokens, 0)  # each half of the rows into the other's place
        if bias is not None:
            logits = logits + (bias if self.heads == 1 else bias.repeat_interleave(self.heads, 0))
        weights = torch.softmax(logits, -1)
        if self.anchored:
            # of the whole shape and layout: only then is p − p⁰ exactly zero at the start
            initial = torch.zeros_like(weights)
            weights -= torch.softmax(initial if prior_bias is None else initial + prior_bias, -1)
        if gain != 1:
            weights *= gain
        if self.heads > 1:
            by_read = weights.view(len(weights), reads, self.heads, size)
            weights = by_read.transpose(1, 2).reshape(len(weights) * self.heads, reads, size)
        mixes = torch.bmm(weights, self.values.narrow(1, 0, size))  # [G·n·H, reads, d]
        if self.is_row:
            found = [mixes] if reads == 1 else list(mixes.split(1, 1))
        else:
            found = self._by_read(mixes, reads)
        if not ahead:
            return found, logits
        self.ready = dict(enumerate(found, first))
        return found[:count], None

    def _by_read(self, mixes: Tensor, reads: int) -> list[Tensor]:
        if reads == self.heads == 1:
            return list(mixes.view(self.groups, *self.shape).unbind())
        of_reads = mixes.view(self.groups, self.tokens, self.heads, reads, self.part).permute(0, 3, 1, 2, 4)
        return [mix.reshape(self.shape) for mix in of_reads.flatten(0, 1).unbind()]

    def totals(self, values: Sequence[Sequence[Tensor]] | None = None) -> Sequence[Tensor]:
        """Σ v [..., D] of every group, with the private sources of the last read where given."""
        size = self.count if values is None else self.count + len(values[0])
        return [total.view(self.shape) for total in sum(self.rows[1:size], self.rows[0]).unbind()]

    def weights(self, logits: Tensor) -> Tensor:
        """p [G, count, S, ..., H] of a read's logits."""
        reads, size = logits.shape[1] // self.heads, logits.shape[2]
        weights = torch.softmax(logits, -1).view(self.groups, self.tokens, reads, self.heads, size)
        return weights.permute(0, 2, 4, 1, 3).reshape(self.groups, reads, size, *self.shape[:-1], self.heads)
