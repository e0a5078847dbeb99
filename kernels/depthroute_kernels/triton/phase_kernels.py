# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Phase: all queries of a group of reads on the sources that all of them see, forward and backward.

One program holds a block of queries for one token and walks through the sources once. Letters as in `depth_backend`; G is the
number of inputs that share a launch, C the number of complete reads. Layouts, all contiguous:

    table (addresses)   forward:  G·S values, G·S keys, G queries, G biases, G bases, G·C complete, G·(M−C) numerators, G totals
                        backward: G·S values, G·S keys, G queries, G biases, G·M gradients of reads, G gradients of totals,
                                  G·S gradients of values, G·S gradients of keys (0: absent, not wanted)
    logits              [G, T, S, M, H]           inverse_rms        [G, T, S]
    sums, maxima        [G, M, T, H]              prior sums, maxima [G, T, H]

What is absent takes no room in the table. Exact zeros of anchored reads rest on two rules: e and e⁰, like both accumulators,
are computed by the same instructions (`tl.fma`, so that no compiler chooses which product is rounded), and a quotient, never
a product, stands on both sides of a difference.
"""

import triton
import triton.language as tl

from .rows import LOWEST, columns, publish, row, row_of_each


@triton.jit(do_not_specialize=["tokens", "count", "queries", "complete", "groups"])
def phase_forward(
    table,
    prior_bias,
    logits,
    inverse_rms,
    sums,
    maxima,
    prior_sums,
    prior_maxima,
    tokens,
    count,
    queries,
    complete,
    groups,
    gain: tl.float64,
    EPS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TYPE: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    OWN_KEYS: tl.constexpr,
    BIASED: tl.constexpr,
    BASED: tl.constexpr,
    ANCHORED: tl.constexpr,
    PRIOR_BIASED: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    tokens = tokens.to(tl.int64)
    gain = tl.full([], gain, ACCUMULATOR)
    blocks = tl.cdiv(queries, BLOCK_M)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    group = tl.program_id(1)
    width = HEADS * HEAD_DIM
    offset = token * width

    m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    h = tl.arange(0, BLOCK_H)
    of_query = m < queries
    of_read = of_query[:, None] & (h < HEADS)[None, :]
    column, inside = columns(0, 0, HEADS, HEAD_DIM, BLOCK_H, BLOCK_D)
    of_tile = of_query[:, None, None] & inside[None, :, :]

    keys_at = groups * count
    queries_at = keys_at + groups * count if OWN_KEYS else keys_at
    biases_at = queries_at + groups
    bases_at = biases_at + groups if BIASED else biases_at
    complete_at = bases_at + groups if BASED else bases_at
    numerators_at = complete_at + groups * complete
    totals_at = numerators_at + groups * (queries - complete)

    query_row = row(table, queries_at + group, 0, ACCUMULATOR, ALIGNED)
    query = tl.load(query_row + m[:, None, None] * width + column[None, :, :], mask=of_tile, other=0.0)
    top = tl.full([BLOCK_M, BLOCK_H], LOWEST, ACCUMULATOR)
    total = tl.zeros([BLOCK_M, BLOCK_H], ACCUMULATOR)
    mix = tl.zeros([BLOCK_M, BLOCK_H, BLOCK_D], ACCUMULATOR)
    prior_top = tl.full([BLOCK_H], LOWEST, ACCUMULATOR)
    prior_total = tl.zeros([BLOCK_H], ACCUMULATOR)
    prior_mix = tl.zeros([BLOCK_H, BLOCK_D], ACCUMULATOR)

    first = (group * tokens + token) * count
    for i in tl.range(0, count, num_stages=STAGES):
        value_row = row(table, group * count + i, offset, TYPE, ALIGNED)
        value = tl.load(value_row + column, mask=inside, other=0.0).to(ACCUMULATOR)
        key = value
        if OWN_KEYS:
            key_row = row(table, keys_at + group * count + i, offset, TYPE, ALIGNED)
            key = tl.load(key_row + column, mask=inside, other=0.0).to(ACCUMULATOR)
        inverse = tl.rsqrt(tl.sum(key * key) / width + EPS)
        logit = tl.sum(query * key[None, :, :], axis=2) * inverse
        if BIASED:
            bias_row = row(table, biases_at + group, 0, ACCUMULATOR, False)
            logit += tl.load(bias_row + m * count + i, mask=of_query, other=0.0)[:, None]
        here = first + i
        tl.store(logits + here * queries * HEADS + m[:, None] * HEADS + h[None, :], logit, mask=of_read)
        if block == 0:
            tl.store(inverse_rms + here, inverse)

        new_top = tl.maximum(top, logit)
        shrink = tl.exp(top - new_top)
        weight = tl.exp(logit - new_top)
        total = tl.fma(total, shrink, weight)
        weights = tl.broadcast_to(weight[:, :, None], BLOCK_M, BLOCK_H, BLOCK_D)
        values = tl.broadcast_to(value[None, :, :], BLOCK_M, BLOCK_H, BLOCK_D)
        mix = tl.fma(weights, values, mix * shrink[:, :, None])
        top = new_top
        if ANCHORED:
            prior_logit = tl.zeros([BLOCK_H], ACCUMULATOR)
            if PRIOR_BIASED:
                prior_logit += tl.load(prior_bias + i)
            new_prior_top = tl.maximum(prior_top, prior_logit)
            prior_shrink = tl.exp(prior_top - new_prior_top)
            prior_weight = tl.exp(prior_logit - new_prior_top)
            prior_total = tl.fma(prior_total, prior_shrink, prior_weight)
            prior_weights = tl.broadcast_to(prior_weight[:, None], BLOCK_H, BLOCK_D)
            prior_mix = tl.fma(prior_weights, value, prior_mix * prior_shrink[:, None])
            prior_top = new_prior_top

    per_read = ((group * queries + m)[:, None] * tokens + token) * HEADS + h[None, :]
    tl.store(sums + per_read, total, mask=of_read)
    tl.store(maxima + per_read, top, mask=of_read)

    if block * BLOCK_M < complete:
        finished = mix / total[:, :, None]
        if ANCHORED:
            finished -= (prior_mix / prior_total[:, None])[None, :, :]
        finished = gain * finished
        out_type: tl.constexpr = TYPE if BASED else ACCUMULATOR
        if BASED:
            base_row = row(table, bases_at + group, offset, TYPE, ALIGNED)
            finished += tl.load(base_row + column, mask=inside, other=0.0).to(ACCUMULATOR)[None, :, :]
        whole = m < complete
        out = row_of_each(table, complete_at + group * complete + m, whole, offset, out_type, ALIGNED)
        tl.store(
            out[:, None, None] + column[None, :, :],
            finished.to(out_type),
            mask=whole[:, None, None] & inside[None, :, :],
        )
    if block * BLOCK_M + BLOCK_M > complete:
        part = of_query & (m >= complete)
        numerator = mix
        if ANCHORED:
            numerator = mix - prior_mix[None, :, :]
        entry = numerators_at + group * (queries - complete) + m - complete
        out = row_of_each(table, entry, part, offset, ACCUMULATOR, ALIGNED)
        tl.store(out[:, None, None] + column[None, :, :], numerator, mask=part[:, None, None] & inside[None, :, :])
    if ANCHORED:  # noqa: SIM102 - a constant and a number: only the first prunes what is compiled
        if block == 0:
            per_token = (group * tokens + token) * HEADS + h
            tl.store(prior_sums + per_token, prior_total, mask=h < HEADS)
            tl.store(prior_maxima + per_token, prior_top, mask=h < HEADS)
            if complete < queries:
                total_row = row(table, totals_at + group, offset, ACCUMULATOR, ALIGNED)
                tl.store(total_row + column, prior_mix, mask=inside)


@triton.jit(do_not_specialize=["tokens", "count", "queries", "complete", "groups", "programs"])
def phase_backward(
    table,
    prior_bias,
    logits,
    inverse_rms,
    sums,
    maxima,
    prior_sums,
    prior_maxima,
    grad_sums,
    grad_logits,
    pulls,
    grad_queries,
    tokens,
    count,
    queries,
    complete,
    groups,
    programs,
    gain: tl.float64,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TYPE: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    OWN_KEYS: tl.constexpr,
    BIASED: tl.constexpr,
    BASED: tl.constexpr,
    ANCHORED: tl.constexpr,
    PRIOR_BIASED: tl.constexpr,
    HAS_GRAD_SUMS: tl.constexpr,
    ALIGNED: tl.constexpr,
    AMD: tl.constexpr,
    DOTS: tl.constexpr,
    APPLY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_DOTS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    APPLY_H: tl.constexpr,
    APPLY_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Two steps for each token. DOTS needs whole rows and gives numbers: G·v, the gradient of every logit (grad_logits, laid
    out as the logits) and how far it pulls each key back to its sphere (pulls, as inverse_rms). APPLY is elementwise over
    the width: gradients of sources, and a sum over this program's tokens for the queries (grad_queries [G, programs, M, D]).
    Where M · D is small one launch does both and reads everything once; else there is one launch for each, and the grid of
    the second divides the width too. BLOCK_M is a power of two ≥ M.
    """
    tokens = tokens.to(tl.int64)
    gain = tl.full([], gain, ACCUMULATOR)
    program = tl.program_id(0)
    split = tl.program_id(1)
    group = tl.program_id(2)
    width = HEADS * HEAD_DIM

    m = tl.arange(0, BLOCK_M)
    is_complete = m < complete
    keys_at = groups * count
    queries_at = keys_at + groups * count if OWN_KEYS else keys_at
    biases_at = queries_at + groups
    grads_at = biases_at + groups if BIASED else biases_at
    grad_totals_at = grads_at + groups * queries
    grad_values_at = grad_totals_at + groups
    grad_keys_at = grad_values_at + groups * count
    grad_type: tl.constexpr = TYPE if BASED else ACCUMULATOR

    splits_of_head: tl.constexpr = (HEAD_DIM + APPLY_D - 1) // APPLY_D
    first_head = (split // splits_of_head) * APPLY_H
    ah = first_head + tl.arange(0, APPLY_H)
    column, inside = columns(first_head, (split % splits_of_head) * APPLY_D, HEADS, HEAD_DIM, APPLY_H, APPLY_D)
    of_tile = (m < queries)[:, None, None] & inside[None, :, :]
    of_apply = (m < queries)[:, None] & (ah < HEADS)[None, :]
    if APPLY:
        query_row = row(table, queries_at + group, 0, ACCUMULATOR, ALIGNED)
        query = tl.load(query_row + m[:, None, None] * width + column[None, :, :], mask=of_tile, other=0.0)
        grad_query = tl.zeros([BLOCK_M, APPLY_H, APPLY_D], ACCUMULATOR)

    for index in range(program, tokens, programs):
        token = index + tl.zeros([], tl.int64)
        offset = token * width
        first = (group * tokens + token) * count

        if DOTS:
            h = tl.arange(0, BLOCK_H)
            row_column, row_inside = columns(0, 0, HEADS, HEAD_DIM, BLOCK_H, BLOCK_D)
            for start in range(0, queries, BLOCK_DOTS):
                part = start + tl.arange(0, BLOCK_DOTS)
                grad = grads_of(
                    table, grads_at + group * queries, part, queries, complete, offset, row_column, row_inside,
                    grad_type, ACCUMULATOR, ALIGNED,
                )  # fmt: skip
                at = part[:, None] * HEADS + h[None, :]
                of_part = (part < queries)[:, None] & (h < HEADS)[None, :]
                for i in tl.range(0, count, num_stages=STAGES):
                    value_row = row(table, group * count + i, offset, TYPE, ALIGNED)
                    value = tl.load(value_row + row_column, mask=row_inside, other=0.0).to(ACCUMULATOR)
                    dot = tl.sum(grad * value[None, :, :], axis=2)
                    tl.store(grad_logits + (first + i) * queries * HEADS + at, dot, mask=of_part)
            publish(AMD)

            of_read = (m < queries)[:, None] & (h < HEADS)[None, :]
            at = m[:, None] * HEADS + h[None, :]
            per_read = ((group * queries + m)[:, None] * tokens + token) * HEADS + h[None, :]
            top = tl.load(maxima + per_read, mask=of_read, other=0.0)
            total = tl.load(sums + per_read, mask=of_read, other=1.0)
            grad_sum = tl.zeros([BLOCK_M, BLOCK_H], ACCUMULATOR)
            if HAS_GRAD_SUMS:
                grad_sum += tl.load(grad_sums + per_read, mask=of_read, other=0.0)
            mean = tl.zeros([BLOCK_M, BLOCK_H], ACCUMULATOR)
            if complete > 0:
                for i in range(count):
                    here = (first + i) * queries * HEADS + at
                    p = tl.exp(tl.load(logits + here, mask=of_read, other=0.0) - top) / total
                    mean += p * tl.load(grad_logits + here, mask=of_read, other=0.0)
            for i in range(count):
                here = (first + i) * queries * HEADS + at
                score = tl.load(logits + here, mask=of_read, other=0.0)
                dot = tl.load(grad_logits + here, mask=of_read, other=0.0)
                weight = tl.exp(score - top)
                whole = gain * (weight / total * (dot - mean))
                by_logit = tl.where(is_complete[:, None], whole, weight * (dot + grad_sum))
                by_logit = tl.where(of_read, by_logit, 0.0)
                tl.store(grad_logits + here, by_logit, mask=of_read)
                if BIASED:
                    bias_row = row(table, biases_at + group, 0, ACCUMULATOR, False)
                    score -= tl.load(bias_row + m * count + i, mask=m < queries, other=0.0)[:, None]
                inverse = tl.load(inverse_rms + first + i)
                tl.store(pulls + first + i, tl.sum(by_logit * score) * (inverse * inverse / width))
            publish(AMD)

        if APPLY:
            grad = grads_of(
                table, grads_at + group * queries, m, queries, complete, offset, column, inside,
                grad_type, ACCUMULATOR, ALIGNED,
            )  # fmt: skip
            at = m[:, None] * HEADS + ah[None, :]
            per_read = ((group * queries + m)[:, None] * tokens + token) * HEADS + ah[None, :]
            top = tl.load(maxima + per_read, mask=of_apply, other=0.0)
            total = tl.load(sums + per_read, mask=of_apply, other=1.0)
            # e · gain / Z for a complete read, e for a partial one
            share = tl.where(is_complete[:, None], gain / total, 1.0)
            if ANCHORED:
                per_token = (group * tokens + token) * HEADS + ah
                prior_top = tl.load(prior_maxima + per_token, mask=ah < HEADS, other=0.0)
                prior_total = tl.load(prior_sums + per_token, mask=ah < HEADS, other=1.0)
                prior_share = tl.where(is_complete[:, None], (gain / prior_total)[None, :], 1.0)
                total_address = tl.load(table + grad_totals_at + group)
                grad_total = tl.load(
                    row(table, grad_totals_at + group, offset, ACCUMULATOR, ALIGNED) + column,
                    mask=inside & (total_address != 0),
                    other=0.0,
                )
            for i in tl.range(0, count, num_stages=STAGES):
                here = (first + i) * queries * HEADS + at
                weight = tl.exp(tl.load(logits + here, mask=of_apply, other=LOWEST) - top) * share
                by_score = tl.load(grad_logits + here, mask=of_apply, other=0.0) * tl.load(inverse_rms + first + i)
                if ANCHORED:
                    prior_logit = tl.zeros([APPLY_H], ACCUMULATOR)
                    if PRIOR_BIASED:
                        prior_logit += tl.load(prior_bias + i)
                    prior_weight = tl.exp(prior_logit - prior_top)
                    weight -= tl.where(of_apply, prior_weight[None, :] * prior_share, 0.0)
                if OWN_KEYS:
                    key_row = row(table, keys_at + group * count + i, offset, TYPE, ALIGNED)
                else:
                    key_row = row(table, group * count + i, offset, TYPE, ALIGNED)
                key = tl.load(key_row + column, mask=inside, other=0.0).to(ACCUMULATOR)
                grad_query += by_score[:, :, None] * key[None, :, :]
                grad_value = tl.sum(weight[:, :, None] * grad, axis=0)
                if ANCHORED:
                    grad_value += prior_weight[:, None] * grad_total
                grad_key = tl.sum(by_score[:, :, None] * query, axis=0) - tl.load(pulls + first + i) * key
                if OWN_KEYS:
                    key_address = tl.load(table + grad_keys_at + group * count + i)
                    out = row(table, grad_keys_at + group * count + i, offset, TYPE, ALIGNED)
                    tl.store(out + column, grad_key.to(TYPE), mask=inside & (key_address != 0))
                else:
                    grad_value += grad_key
                value_address = tl.load(table + grad_values_at + group * count + i)
                out = row(table, grad_values_at + group * count + i, offset, TYPE, ALIGNED)
                tl.store(out + column, grad_value.to(TYPE), mask=inside & (value_address != 0))

    if APPLY:
        out = grad_queries + (group * programs + program).to(tl.int64) * queries * width
        tl.store(out + m[:, None, None] * width + column[None, :, :], grad_query, mask=of_tile)


@triton.jit
def grads_of(
    table,
    first_entry,
    m,
    queries,
    complete,
    offset,
    column,
    inside,
    COMPLETE_TYPE: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Rows of the gradients of reads `m`, zero where there is none."""
    if COMPLETE_TYPE == ACCUMULATOR:
        return rows_of(table, first_entry, m, m < queries, offset, column, inside, ACCUMULATOR, ALIGNED)
    whole = rows_of(table, first_entry, m, m < complete, offset, column, inside, COMPLETE_TYPE, ALIGNED)
    part = rows_of(table, first_entry, m, (m >= complete) & (m < queries), offset, column, inside, ACCUMULATOR, ALIGNED)
    return whole.to(ACCUMULATOR) + part


@triton.jit
def rows_of(table, first_entry, m, there, offset, column, inside, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    addresses = tl.load(table + first_entry + m, mask=there, other=0)
    pointers = row_of_each(table, first_entry + m, there, offset, TYPE, ALIGNED)
    mask = (addresses != 0)[:, None, None] & inside[None, :, :]
    return tl.load(pointers[:, None, None] + column[None, :, :], mask=mask, other=0.0)
