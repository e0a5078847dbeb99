# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Merge: one partial read of a phase and the sources that only it sees, forward and backward.

One program has one token's row in registers at a time. G is the number of inputs that share a launch, P the number of private
sources. Layouts, all contiguous:

    table (addresses)   forward:  G·P values, G·P keys, G queries, G biases, G numerators, G sums, G maxima, G totals,
                                  G prior sums, G prior maxima, G bases, G outputs, G mixes
                        backward: G·P values, G·P keys, G queries, G biases, G sums, G maxima, G totals, G prior sums,
                                  G prior maxima, G reads (x, or the mix), G bases or starts, G gradients of x, then what is
                                  written: G gradients of numerators, of sums, of totals, G·P of values, G·P of keys
                                  (0: absent, not wanted)
    logits              [G, T, P, H]              inverse_rms         [G, T, P]

What is absent takes no room in the table. The rules that keep anchored reads exact are those of `phase_kernels`.
"""

import triton
import triton.language as tl

from .rows import columns, publish, row


@triton.jit
def shares(
    table,
    sums_entry,
    maxima_entry,
    logits,
    first,
    count,
    token,
    OF_PRIOR: tl.constexpr,
    BIASED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
):
    """f, c and the private sources' part of Z, from the logits [T, P, H], or from the prior's biases [P] (or zeros)."""
    h = tl.arange(0, BLOCK_H)
    phase_top = tl.load(row(table, maxima_entry, token * HEADS, ACCUMULATOR, False) + h, mask=h < HEADS, other=0.0)
    phase_total = tl.load(row(table, sums_entry, token * HEADS, ACCUMULATOR, False) + h, mask=h < HEADS, other=1.0)
    top = phase_top
    for j in range(count):
        top = tl.maximum(top, logit_of(logits, first, j, OF_PRIOR, BIASED, HEADS, BLOCK_H, ACCUMULATOR))
    private = tl.zeros([BLOCK_H], ACCUMULATOR)
    for j in range(count):
        private += tl.exp(logit_of(logits, first, j, OF_PRIOR, BIASED, HEADS, BLOCK_H, ACCUMULATOR) - top)
    shrink = tl.exp(phase_top - top)
    total = tl.fma(shrink, phase_total, private)
    return shrink / total, top, total


@triton.jit
def logit_of(
    logits,
    first,
    j,
    OF_PRIOR: tl.constexpr,
    BIASED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
):
    h = tl.arange(0, BLOCK_H)
    if OF_PRIOR:
        logit = tl.zeros([BLOCK_H], ACCUMULATOR)
        if BIASED:
            logit += tl.load(logits + j)
    else:
        logit = tl.load(logits + (first + j) * HEADS + h, mask=h < HEADS, other=0.0)
    return logit


@triton.jit(do_not_specialize=["tokens", "count", "groups"])
def merge_forward(
    table,
    prior_bias,
    logits,
    inverse_rms,
    tokens,
    count,
    groups,
    gain: tl.float64,
    EPS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TYPE: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    OUT: tl.constexpr,
    OWN_KEYS: tl.constexpr,
    BIASED: tl.constexpr,
    BASED: tl.constexpr,
    ANCHORED: tl.constexpr,
    PRIOR_BIASED: tl.constexpr,
    KEEP_MIX: tl.constexpr,
    ALIGNED: tl.constexpr,
    AMD: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    tokens = tokens.to(tl.int64)
    gain = tl.full([], gain, ACCUMULATOR)
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    width = HEADS * HEAD_DIM
    offset = token * width
    h = tl.arange(0, BLOCK_H)
    column, inside = columns(0, 0, HEADS, HEAD_DIM, BLOCK_H, BLOCK_D)

    keys_at = groups * count
    queries_at = keys_at + groups * count if OWN_KEYS else keys_at
    biases_at = queries_at + groups
    numerators_at = biases_at + groups if BIASED else biases_at
    sums_at = numerators_at + groups
    maxima_at = sums_at + groups
    totals_at = maxima_at + groups
    prior_sums_at = totals_at + groups
    prior_maxima_at = prior_sums_at + groups
    bases_at = prior_maxima_at + groups if ANCHORED else totals_at
    outputs_at = bases_at + groups if BASED else bases_at
    mixes_at = outputs_at + groups

    query = tl.load(row(table, queries_at + group, 0, ACCUMULATOR, ALIGNED) + column, mask=inside, other=0.0)
    first = (group * tokens + token) * count
    for j in range(count):
        if OWN_KEYS:
            key_row = row(table, keys_at + group * count + j, offset, TYPE, ALIGNED)
        else:
            key_row = row(table, group * count + j, offset, TYPE, ALIGNED)
        key = tl.load(key_row + column, mask=inside, other=0.0).to(ACCUMULATOR)
        inverse = tl.rsqrt(tl.sum(key * key) / width + EPS)
        logit = tl.sum(query * key, axis=1) * inverse
        if BIASED:
            logit += tl.load(row(table, biases_at + group, j, ACCUMULATOR, False))
        tl.store(logits + (first + j) * HEADS + h, logit, mask=h < HEADS)
        tl.store(inverse_rms + first + j, inverse)
    publish(AMD)

    share, top, total = shares(
        table,
        sums_at + group,
        maxima_at + group,
        logits,
        first,
        count,
        token,
        False,
        False,
        HEADS,
        BLOCK_H,
        ACCUMULATOR,
    )
    numerator = tl.load(
        row(table, numerators_at + group, offset, ACCUMULATOR, ALIGNED) + column, mask=inside, other=0.0
    )
    mix = share[:, None] * numerator
    if ANCHORED:
        prior_share, prior_top, prior_total = shares(
            table, prior_sums_at + group, prior_maxima_at + group, prior_bias, first, count, token, True, PRIOR_BIASED,
            HEADS, BLOCK_H, ACCUMULATOR,
        )  # fmt: skip
        prior_mix = tl.load(
            row(table, totals_at + group, offset, ACCUMULATOR, ALIGNED) + column, mask=inside, other=0.0
        )
        mix += (share - prior_share)[:, None] * prior_mix
    for j in range(count):
        weight = tl.exp(logit_of(logits, first, j, False, False, HEADS, BLOCK_H, ACCUMULATOR) - top) / total
        if ANCHORED:
            prior_logit = logit_of(prior_bias, first, j, True, PRIOR_BIASED, HEADS, BLOCK_H, ACCUMULATOR)
            weight -= tl.exp(prior_logit - prior_top) / prior_total
        value_row = row(table, group * count + j, offset, TYPE, ALIGNED)
        mix += weight[:, None] * tl.load(value_row + column, mask=inside, other=0.0).to(ACCUMULATOR)
    if KEEP_MIX:
        tl.store(row(table, mixes_at + group, offset, TYPE, ALIGNED) + column, mix.to(TYPE), mask=inside)
    read = gain * mix
    if BASED:
        base_row = row(table, bases_at + group, offset, TYPE, ALIGNED)
        read += tl.load(base_row + column, mask=inside, other=0.0).to(ACCUMULATOR)
    tl.store(row(table, outputs_at + group, offset, OUT, ALIGNED) + column, read.to(OUT), mask=inside)


@triton.jit(do_not_specialize=["tokens", "count", "groups", "programs", "summands"])
def merge_backward(
    table,
    prior_bias,
    logits,
    inverse_rms,
    grad_logits,
    grad_queries,
    tokens,
    count,
    groups,
    programs,
    summands,
    gain: tl.float64,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TYPE: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    OUT: tl.constexpr,
    OWN_KEYS: tl.constexpr,
    BIASED: tl.constexpr,
    SUBTRACT: tl.constexpr,
    SUMMANDS: tl.constexpr,
    KEEP_MIX: tl.constexpr,
    ANCHORED: tl.constexpr,
    PRIOR_BIASED: tl.constexpr,
    WANT_LOGITS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Gradients of one program's tokens. With g = gain · ∂x and A = g · (plain mix of phase and private sources), for each head:

        ∂N = f g      ∂Z = −f A      ∂U = (f − f⁰) g      ∂l_j = p_j (g · v_j − A)      ∂v_j = (p_j − p⁰_j) g + through l_j

    The mix is not kept: A = ∂x · (gain · mix), and gain · mix = x − base (SUBTRACT; SUMMANDS: base = start + the first private values), except in 16 bits,
    where x and the base are rounded more than the mix can bear. An anchored read's own mix lacks f⁰ U + Σ p⁰_j v_j.
    """
    tokens = tokens.to(tl.int64)
    gain = tl.full([], gain, ACCUMULATOR)
    program = tl.program_id(0)
    group = tl.program_id(1)
    width = HEADS * HEAD_DIM
    h = tl.arange(0, BLOCK_H)
    column, inside = columns(0, 0, HEADS, HEAD_DIM, BLOCK_H, BLOCK_D)

    keys_at = groups * count
    queries_at = keys_at + groups * count if OWN_KEYS else keys_at
    biases_at = queries_at + groups
    sums_at = biases_at + groups if BIASED else biases_at
    maxima_at = sums_at + groups
    totals_at = maxima_at + groups
    prior_sums_at = totals_at + groups
    prior_maxima_at = prior_sums_at + groups
    reads_at = prior_maxima_at + groups if ANCHORED else totals_at
    bases_at = reads_at + groups
    grads_at = bases_at + groups if SUBTRACT else bases_at
    grad_numerators_at = grads_at + groups
    grad_sums_at = grad_numerators_at + groups
    grad_totals_at = grad_sums_at + groups
    grad_values_at = grad_totals_at + groups
    grad_keys_at = grad_values_at + groups * count

    query = tl.load(row(table, queries_at + group, 0, ACCUMULATOR, ALIGNED) + column, mask=inside, other=0.0)
    grad_query = tl.zeros([BLOCK_H, BLOCK_D], ACCUMULATOR)
    for index in range(program, tokens, programs):
        token = index + tl.zeros([], tl.int64)
        offset = token * width
        first = (group * tokens + token) * count
        share, top, total = shares(
            table, sums_at + group, maxima_at + group, logits, first, count, token, False, False,
            HEADS, BLOCK_H, ACCUMULATOR,
        )  # fmt: skip
        grad_row = row(table, grads_at + group, offset, OUT, ALIGNED)
        grad_read = tl.load(grad_row + column, mask=inside, other=0.0).to(ACCUMULATOR)
        grad = gain * grad_read

        # gain times the plain mix
        read_row = row(table, reads_at + group, offset, TYPE if KEEP_MIX else OUT, ALIGNED)
        read = tl.load(read_row + column, mask=inside, other=0.0).to(ACCUMULATOR)
        if KEEP_MIX:
            read = gain * read
        if SUBTRACT:
            base_row = row(table, bases_at + group, offset, TYPE, ALIGNED)
            read -= tl.load(base_row + column, mask=inside, other=0.0).to(ACCUMULATOR)
            if SUMMANDS:
                for j in range(summands):
                    value_row = row(table, group * count + j, offset, TYPE, ALIGNED)
                    read -= tl.load(value_row + column, mask=inside, other=0.0).to(ACCUMULATOR)
        if ANCHORED:
            prior_share, prior_top, prior_total = shares(
                table, prior_sums_at + group, prior_maxima_at + group, prior_bias, first, count, token, True,
                PRIOR_BIASED, HEADS, BLOCK_H, ACCUMULATOR,
            )  # fmt: skip
            total_row = row(table, totals_at + group, offset, ACCUMULATOR, ALIGNED)
            prior_mix = prior_share[:, None] * tl.load(total_row + column, mask=inside, other=0.0)
            for j in range(count):
                prior_logit = logit_of(prior_bias, first, j, True, PRIOR_BIASED, HEADS, BLOCK_H, ACCUMULATOR)
                prior_weight = tl.exp(prior_logit - prior_top) / prior_total
                value_row = row(table, group * count + j, offset, TYPE, ALIGNED)
                value = tl.load(value_row + column, mask=inside, other=0.0).to(ACCUMULATOR)
                prior_mix += prior_weight[:, None] * value
            read += gain * prior_mix
        mean = tl.sum(grad_read * read, axis=1)

        store_row(
            table, grad_numerators_at + group, offset, share[:, None] * grad, column, inside, ACCUMULATOR, ALIGNED
        )
        store_row(table, grad_sums_at + group, token * HEADS, -share * mean, h, h < HEADS, ACCUMULATOR, False)
        if ANCHORED:
            by_total = (share - prior_share)[:, None] * grad
            store_row(table, grad_totals_at + group, offset, by_total, column, inside, ACCUMULATOR, ALIGNED)

        for j in range(count):
            value_row = row(table, group * count + j, offset, TYPE, ALIGNED)
            value = tl.load(value_row + column, mask=inside, other=0.0).to(ACCUMULATOR)
            key = value
            if OWN_KEYS:
                key_row = row(table, keys_at + group * count + j, offset, TYPE, ALIGNED)
                key = tl.load(key_row + column, mask=inside, other=0.0).to(ACCUMULATOR)
            score = logit_of(logits, first, j, False, False, HEADS, BLOCK_H, ACCUMULATOR)
            weight = tl.exp(score - top) / total
            by_logit = tl.where(h < HEADS, weight * (tl.sum(grad * value, axis=1) - mean), 0.0)
            if WANT_LOGITS:
                tl.store(grad_logits + (first + j) * HEADS + h, by_logit, mask=h < HEADS)
            if BIASED:
                score -= tl.load(row(table, biases_at + group, j, ACCUMULATOR, False))
            if ANCHORED:
                prior_logit = logit_of(prior_bias, first, j, True, PRIOR_BIASED, HEADS, BLOCK_H, ACCUMULATOR)
                weight -= tl.exp(prior_logit - prior_top) / prior_total
            inverse = tl.load(inverse_rms + first + j)
            by_score = by_logit * inverse
            pull = tl.sum(by_logit * score) * (inverse * inverse / width)
            grad_query += by_score[:, None] * key
            grad_value = weight[:, None] * grad
            grad_key = by_score[:, None] * query - pull * key
            if OWN_KEYS:
                entry = grad_keys_at + group * count + j
                store_row(table, entry, offset, grad_key, column, inside, TYPE, ALIGNED)
            else:
                grad_value += grad_key
            entry = grad_values_at + group * count + j
            store_row(table, entry, offset, grad_value, column, inside, TYPE, ALIGNED)

    out = grad_queries + (group * programs + program).to(tl.int64) * width
    tl.store(out + column, grad_query, mask=inside)


@triton.jit
def store_row(table, entry, offset, numbers, column, inside, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Store a tile as a row, unless the tensor is not wanted."""
    wanted = tl.load(table + entry) != 0
    tl.store(row(table, entry, offset, TYPE, ALIGNED) + column, numbers.to(TYPE), mask=inside & wanted)
