# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Depth reads against their equations: the cases, and what has to hold in each, on whatever device there is.

    for case in pairwise_cases():                # or every_case()
        for name in implementations_for(case, "cuda"):
            run_case(case, name, "cuda")         # raises CheckFailed

The equations are evaluated here once more, on stacked sources in float64, and autograd differentiates them.

Dimension letters: B batch, T tokens, D width, S sources, H depth heads, M queries, P private sources of a partial read.
"""

import itertools
import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from depthroute.errors import CheckFailed
from depthroute.modeling import depth_ops
from depthroute.modeling.depth_backend import MergeInput, PhaseInput

from .dispatch import BACKENDS, IMPLEMENTATIONS, depth_read


BATCH = 2
SCALED = {"gain": 3.0, "scale": 0.7, "eps": 1e-3}
UNSCALED = {"gain": 1.0, "scale": 1.0, "eps": 1e-6}


class ReadCase(NamedTuple):
    """One call of the public operator. `width` is rounded up to a multiple of the heads."""

    sources: int
    width: int
    heads: int
    tokens: int
    queries: int
    anchored: bool
    base: bool
    bias: bool
    keys: bool
    scaled: bool
    dtype: str

    def __str__(self) -> str:
        return describe(self)


class PartialCase(NamedTuple):
    """One phase and the merges of its partial reads. `base`: "none", "kept", or "start": the merge is given the stream at the
    time of the phase, to which the private sources have been added since. `inputs`: as many independent phases in one call."""

    sources: int
    private: int
    width: int
    heads: int
    tokens: int
    complete: int
    partial: int
    inputs: int
    anchored: bool
    base: str
    bias: bool
    keys: bool
    dtype: str

    def __str__(self) -> str:
        return describe(self)


Case = ReadCase | PartialCase

DTYPES = ("float64", "float32", "bfloat16", "float16")
BOTH = (False, True)
READ_FACTORS: dict[str, tuple[Any, ...]] = {
    "sources": (1, 2, 3, 8, 31, 33, 57, 129),
    "width": (16, 64, 123, 257, 1024),
    "heads": (1, 4),
    "tokens": (0, 1, 17),
    "queries": (1, 3),
    "anchored": BOTH,
    "base": BOTH,
    "bias": BOTH,
    "keys": BOTH,
    "scaled": BOTH,
}
PARTIAL_FACTORS: dict[str, tuple[Any, ...]] = {
    "sources": (1, 3, 31),
    "private": (1, 2, 5),
    "width": (16, 257),
    "heads": (1, 4),
    "tokens": (1, 17),
    "complete": (0, 1),
    "partial": (1, 2),
    "inputs": (1, 2),
    "anchored": BOTH,
    "base": ("none", "kept", "start"),
    "bias": BOTH,
    "keys": BOTH,
}
FACTORS = {ReadCase: READ_FACTORS, PartialCase: PARTIAL_FACTORS}


def describe(case: Case) -> str:
    """Every field of a case: `read sources=3 width=16 … float32`."""
    kind = "read" if isinstance(case, ReadCase) else "partial read"
    fields = [
        name if value is True else f"{name}={value}" for name, value in case._asdict().items() if value is not False
    ]
    return " ".join([kind, *fields[:-1], case.dtype])


def every_case() -> Iterator[Case]:
    """All combinations of all factors, in every dtype."""
    for kind, factors in FACTORS.items():
        for values in itertools.product(*factors.values(), DTYPES):
            yield kind(*values)


def pairwise_cases() -> list[Case]:
    """A selection, the same every time: in every dtype, every value of every factor with every value of every other."""
    rows = {kind: pairwise(factors) for kind, factors in FACTORS.items()}
    return [kind(*row, dtype) for kind, selected in rows.items() for dtype in DTYPES for row in selected]


def pairwise(factors: Mapping[str, Sequence[Any]], tries: int = 20) -> list[tuple[Any, ...]]:
    """Rows, one value per factor, in which every two values of two factors meet. Greedy, from a fixed seed."""
    generator = random.Random(0)
    values = list(factors.values())
    missing = {
        (i, a, j, b)
        for (i, one), (j, other) in itertools.combinations(enumerate(values), 2)
        for a in range(len(one))
        for b in range(len(other))
    }

    def met(row: Sequence[int]) -> set[tuple[int, int, int, int]]:
        return {(i, a, j, b) for (i, a), (j, b) in itertools.combinations(enumerate(row), 2)} & missing

    rows = []
    while missing:
        i, a, j, b = min(missing)
        candidates = []
        for _ in range(tries):
            row = [generator.randrange(len(choices)) for choices in values]
            row[i], row[j] = a, b
            candidates.append(row)
        best = max(candidates, key=lambda row: len(met(row)))
        missing -= met(best)
        rows.append(tuple(choices[index] for choices, index in zip(values, best)))
    return rows


def implementations_for(case: Case, device: str | torch.device) -> list[str]:
    """The implementations that can run a case on a device. A partial read has none in the reference; and Triton's interpreter
    on a CPU, some milliseconds for each token and source, is not for so many."""
    device, dtype = torch.device(device), getattr(torch, case.dtype)
    names = ["cpu"] if device.type == "cpu" else list(BACKENDS)
    fast = [name for name in names if BACKENDS[name].unavailable(device, dtype) is None]
    return ["reference", *fast] if isinstance(case, ReadCase) else fast


# --- the equations


def equations(
    values: Sequence[Tensor],
    queries: Tensor,
    *,
    keys: Sequence[Tensor] | None = None,
    bias: Tensor | None = None,
    prior_bias: Tensor | None = None,
    base: Tensor | None = None,
    gain: float = 1.0,
    eps: float = 1e-6,
    heads: int = 1,
    anchored: bool = False,
) -> tuple[Tensor, Tensor]:
    """x [M, B, T, D] and p [M, S, B, T, H] of M folded queries [M, D] on sources [B, T, D]; bias [M, S]. In the dtype of what
    is given."""
    stack = torch.stack(tuple(values)).unflatten(-1, (heads, -1))
    normed = torch.stack(tuple(values if keys is None else keys))
    normed = (normed / torch.sqrt(normed.square().mean(-1, keepdim=True) + eps)).unflatten(-1, (heads, -1))
    logits = torch.einsum("sbthd,mhd->msbth", normed, queries.unflatten(-1, (heads, -1)))
    if bias is not None:
        logits = logits + bias[:, :, None, None, None]
    weights = torch.softmax(logits, 1)
    mixed = weights
    if anchored:
        prior = (
            torch.zeros(len(values), dtype=weights.dtype, device=weights.device) if prior_bias is None else prior_bias
        )
        mixed = weights - torch.softmax(prior, 0)[:, None, None, None]
    x = gain * torch.einsum("msbth,sbthd->mbthd", mixed, stack).flatten(-2)
    return x if base is None else base + x, weights


def uncancelled(
    values: Sequence[Tensor],
    queries: Tensor,
    given: Sequence[Tensor],
    weights: Tensor,
    *,
    keys: Sequence[Tensor] | None = None,
    beside: Sequence[Tensor] = (),
    gain: float = 1.0,
    eps: float = 1e-6,
    heads: int = 1,
) -> dict[str, float]:
    """How large the gradients of queries, keys and biases would be if nothing in them cancelled: rounding errors are fractions
    of that. Where a read has hardly a choice, or sources are alike, the gradients themselves are much smaller.

        ∂l_i = p_i (g · v_i − Σ_j p_j g · v_j)   →   p_i (|g| · |v_i| + Σ_j (p_j + p⁰_j) |g| · |v_j| + |g| · |beside|)

    Args:
        values, queries, keys, gain, eps, heads: as in `equations`.
        given: the gradients g of the reads, M tensors [B, T, D].
        weights: p [M, S, B, T, H].
        beside: what an implementation may subtract from x to have the mix, the base for one.
    """
    stack = torch.stack(tuple(values)).detach().double().abs()
    normed = stack if keys is None else torch.stack(tuple(keys)).detach().double().abs()
    inverse_rms = 1 / torch.sqrt(normed.square().mean(-1, keepdim=True) + eps)
    normed, stack = (normed * inverse_rms).unflatten(-1, (heads, -1)), stack.unflatten(-1, (heads, -1))
    gradients = torch.stack(tuple(given)).double().abs().unflatten(-1, (heads, -1))
    by_value = gain * torch.einsum("mbthd,sbthd->msbth", gradients, stack)
    centre = (2 * weights.double() * by_value).sum(1, keepdim=True)
    for tensor in beside:
        both = torch.einsum("mbthd,bthd->mbth", gradients, tensor.detach().double().abs().unflatten(-1, (heads, -1)))
        centre = centre + both.unsqueeze(1)
    by_logit = weights.double() * (by_value + centre)
    size = queries.detach().double().abs().unflatten(-1, (heads, -1))
    return {
        "query": largest(torch.einsum("msbth,sbthd->mhd", by_logit, normed)),
        # along q, and along k itself
        "key": 2 * largest(torch.einsum("msbth,mhd->sbthd", by_logit, size) * inverse_rms.unsqueeze(-1)),
        "bias": largest(by_logit.sum((2, 3, 4))),
    }


def largest(tensor: Tensor) -> float:
    """The largest entry without its sign; 0 where there is none."""
    return tensor.abs().max().item() if tensor.numel() else 0.0


# --- one case


class Inputs:
    """Random tensors of a case, the same on every device; `leaves` are those that get gradients, by name.

    Args:
        case: its text is the seed.
        device: where they go.
    """

    def __init__(self, case: Case, device: torch.device):
        self.generator = torch.Generator().manual_seed(zlib.crc32(str(case).encode()))
        self.device = device
        self.dtype = getattr(torch, case.dtype)
        self.statistics = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.width = -(-case.width // case.heads) * case.heads
        self.shape = (BATCH, case.tokens, self.width)
        # logits of order one and a half: every source counts, and some count more
        self.query_scale = 1.5 * (case.heads / self.width) ** 0.5
        self.leaves: dict[str, Tensor] = {}

    def random(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0, centre: float = 0.0) -> Tensor:
        numbers = torch.randn(shape, generator=self.generator, dtype=torch.float64) * scale + centre
        return numbers.to(dtype or self.dtype).to(self.device)

    def leaf(self, name: str, *shape: int, **values: Any) -> Tensor:
        self.leaves[name] = self.random(*shape, **values).requires_grad_()
        return self.leaves[name]

    def sources(self, name: str, count: int) -> list[Tensor]:
        return [self.leaf(f"{name} {index}", *self.shape) for index in range(count)]

    def exact(self) -> dict[str, Tensor]:
        """The leaves once more, in float64."""
        return {name: tensor.detach().double().requires_grad_() for name, tensor in self.leaves.items()}


class Answer(NamedTuple):
    """What one evaluation of a case gives: reads [B, T, D], weights p, and the gradient of every leaf by name."""

    reads: list[Tensor]
    weights: list[Tensor]
    gradients: dict[str, Tensor]


def differentiated(
    reads: list[Tensor], weights: list[Tensor], leaves: Mapping[str, Tensor], given: Sequence[Tensor]
) -> Answer:
    """The answer with gradients of `reads` weighed by `given`."""
    weighing = [gradient.to(read.dtype) for gradient, read in zip(given, reads)]
    gradients = torch.autograd.grad(reads, list(leaves.values()), weighing, allow_unused=True, materialize_grads=True)
    return Answer([read.detach() for read in reads], weights, dict(zip(leaves, gradients)))


def run_case(case: Case, implementation: str, device: str | torch.device = "cpu") -> None:
    """Compare an implementation with the equations and with the reference in float64: reads, weights, every gradient.

    Raises:
        CheckFailed: they differ; one line names the case, what differs, by how much, and how much is allowed.
    """
    evaluate = read_answers if isinstance(case, ReadCase) else partial_answers
    found, truths, scales = evaluate(case, implementation, torch.device(device))  # type: ignore[arg-type]
    for truth in truths:
        compare(case, implementation, torch.device(device), found, truth, scales)


Scales = dict[str, float]


def read_answers(case: ReadCase, implementation: str, device: torch.device) -> tuple[Answer, list[Answer], Scales]:
    """What the public operator gives, and what it has to give: the equations' answer, and the reference's in float64. And
    what rounding errors of gradients are fractions of, by the first word of a leaf's name."""
    inputs = Inputs(case, device)
    numbers = SCALED if case.scaled else UNSCALED
    values = inputs.sources("value", case.sources)
    keys = inputs.sources("key", case.sources) if case.keys else None
    query = inputs.leaf("query", *([case.queries] if case.queries > 1 else []), inputs.width, scale=inputs.query_scale)
    optional: dict[str, Tensor] = {}
    if case.scaled:
        optional["key_norm"] = inputs.leaf("key_norm", inputs.width, scale=0.1, centre=1.7)
    if case.bias:
        optional["bias"] = inputs.leaf("bias", case.sources)
    if case.base:
        optional["base"] = inputs.leaf("base", *inputs.shape)
    prior_bias = inputs.random(case.sources) if case.bias else None
    given = [inputs.random(*inputs.shape) for _ in range(case.queries)]
    options: dict[str, Any] = {**numbers, "num_heads": case.heads, "anchored": case.anchored}

    def answer(read: Any, leaves: Mapping[str, Tensor], prior_bias: Tensor | None, **more: Any) -> Answer:
        x, p = read(
            [leaves[f"value {index}"] for index in range(case.sources)],
            leaves["query"],
            keys=[leaves[f"key {index}"] for index in range(case.sources)] if case.keys else None,
            prior_bias=prior_bias,
            return_weights=True,
            **{name: leaves[name] for name in optional},
            **options,
            **more,
        )
        p = p.detach().unsqueeze(-1) if case.heads == 1 else p.detach()
        reads, weights = ([x], [p]) if case.queries == 1 else (list(x), list(p))
        return differentiated(reads, weights, leaves, given)

    def by_equations(values: Any, query: Tensor, **named: Any) -> tuple[Tensor, Tensor]:
        folded = named["scale"] * query * named.get("key_norm", 1.0)
        bias = named.get("bias")
        x, p = equations(
            values,
            folded.view(case.queries, -1),
            keys=named["keys"],
            bias=None if bias is None else bias.expand(case.queries, -1),
            prior_bias=named["prior_bias"],
            base=named.get("base"),
            gain=named["gain"],
            eps=named["eps"],
            heads=case.heads,
            anchored=case.anchored,
        )
        x, p = (x, p) if case.queries > 1 else (x[0], p[0])
        return x, p.squeeze(-1) if case.heads == 1 else p

    found = answer(depth_read, inputs.leaves, prior_bias, implementation=implementation)
    exact_prior = None if prior_bias is None else prior_bias.double()
    truths = [answer(by_equations, inputs.exact(), exact_prior)]
    if implementation != "reference":
        truths.append(answer(depth_ops.depth_read, inputs.exact(), exact_prior))
    key_norm = inputs.leaves.get("key_norm", torch.ones(())).detach().double()
    scales = uncancelled(
        values,
        numbers["scale"] * query.detach().double().view(case.queries, -1) * key_norm,
        given,
        torch.stack(truths[0].weights),
        keys=keys,
        beside=[optional["base"]] if case.base else [],
        gain=numbers["gain"],
        eps=numbers["eps"],
        heads=case.heads,
    )
    folded = numbers["scale"] * scales["query"]
    scales |= {"query": folded * largest(key_norm), "key_norm": folded * case.queries * largest(query.double())}
    return found, truths, scales if case.keys else {**scales, "value": scales["key"]}


def partial_answers(
    case: PartialCase, implementation: str, device: torch.device
) -> tuple[Answer, list[Answer], Scales]:
    """What a phase and its merges give, and what the reads over all their sources give: by the equations, and by the
    reference, in float64. And scales, as `read_answers` does."""
    backend, inputs = BACKENDS[implementation], Inputs(case, device)
    reads, count = case.complete + case.partial, case.sources + case.private
    gain, eps = SCALED["gain"], SCALED["eps"]
    given, starts = [], []
    for group in range(case.inputs):
        inputs.sources(f"{group} value", count)
        if case.keys:
            inputs.sources(f"{group} key", count)
        inputs.leaf(f"{group} queries", reads, inputs.width, scale=inputs.query_scale, dtype=inputs.statistics)
        if case.bias:
            inputs.leaf(f"{group} bias", reads, count, dtype=inputs.statistics)
        start = inputs.random(*inputs.shape)
        starts.append(start)
        if case.base != "none":
            base = inputs.leaf(f"{group} base", *inputs.shape)
            if case.base == "start":
                private = [inputs.leaves[f"{group} value {case.sources + index}"] for index in range(case.private)]
                base.data = (start + sum(private)).detach()
        given.append([inputs.random(*inputs.shape) for _ in range(reads)])
    prior_bias = inputs.random(count, dtype=inputs.statistics) if case.bias else None

    def named(leaves: Mapping[str, Tensor], group: int) -> tuple[Any, ...]:
        values = [leaves[f"{group} value {index}"] for index in range(count)]
        keys = [leaves[f"{group} key {index}"] for index in range(count)] if case.keys else None
        return values, keys, leaves[f"{group} queries"], leaves.get(f"{group} bias"), leaves.get(f"{group} base")

    def by_phases() -> Answer:
        options = {"eps": eps, "num_heads": case.heads, "anchored": case.anchored}
        shared, private = slice(case.sources), slice(case.sources, None)
        parts = [named(inputs.leaves, group) for group in range(case.inputs)]
        phases = backend.phase(
            [
                PhaseInput(
                    values[shared],
                    queries,
                    None if keys is None else keys[shared],
                    None if bias is None else bias[:, shared],
                    base,
                )
                for values, keys, queries, bias, base in parts
            ],
            complete=case.complete,
            prior_bias=None if prior_bias is None else prior_bias[shared],
            gain=gain,
            **options,
        )
        found: list[list[Tensor]] = [list(phase.complete) for phase in phases]
        weights = [[torch.softmax(phase.logits[m], 0) for m in range(case.complete)] for phase in phases]
        for index in range(case.partial):
            m = case.complete + index
            merged = backend.merge(
                [
                    MergeInput(
                        phase.partial[index],
                        values[private],
                        queries[m],
                        None if keys is None else keys[private],
                        None if bias is None else bias[m, private],
                        base,
                        start if case.base == "start" else None,
                        case.private if case.base == "start" else 0,
                    )
                    for phase, start, (values, keys, queries, bias, base) in zip(phases, starts, parts)
                ],
                prior_bias=None if prior_bias is None else prior_bias[private],
                gain=gain,
                **options,
            )
            for group, one in enumerate(merged):
                found[group].append(one.x)
                logits = torch.cat([phases[group].logits[m], one.logits])
                weights[group].append(torch.softmax(logits, 0))
        return differentiated(
            list(itertools.chain(*found)), list(itertools.chain(*weights)), inputs.leaves, list(itertools.chain(*given))
        )

    def over_all(reference: bool) -> Answer:
        leaves = inputs.exact()
        exact_prior = None if prior_bias is None else prior_bias.double()
        found, weights = [], []
        for group in range(case.inputs):
            values, keys, queries, bias, base = named(leaves, group)
            for m in range(reads):
                seen = slice(case.sources if m < case.complete else count)
                options: dict[str, Any] = {"keys": None if keys is None else keys[seen], "base": base, "gain": gain}
                options |= {"eps": eps, "anchored": case.anchored}
                options["prior_bias"] = None if exact_prior is None else exact_prior[seen]
                if reference:
                    options |= {"bias": None if bias is None else bias[m, seen], "num_heads": case.heads}
                    x, p = depth_ops.depth_read(values[seen], queries[m], return_weights=True, **options)
                    p = p.unsqueeze(-1) if case.heads == 1 else p
                else:
                    options |= {"bias": None if bias is None else bias[m : m + 1, seen], "heads": case.heads}
                    (x,), (p,) = equations(values[seen], queries[m : m + 1], **options)
                found.append(x)
                weights.append(p.detach())
        return differentiated(found, weights, leaves, list(itertools.chain(*given)))

    found, truths = by_phases(), [over_all(reference=False), over_all(reference=True)]
    scales: Scales = {}
    for group in range(case.inputs):
        values, keys, queries, _, base = named(inputs.leaves, group)
        # complete reads have no weights for private sources
        padded = [nn.functional.pad(p, (0,) * 6 + (0, count - len(p))) for p in truths[0].weights]
        beside = [] if base is None else [base, base]
        here = uncancelled(
            values,
            queries,
            given[group],
            torch.stack(padded[group * reads : (group + 1) * reads]),
            keys=keys,
            beside=[*beside, starts[group], *values[case.sources :]] if case.base == "start" else beside,
            gain=gain,
            eps=eps,
            heads=case.heads,
        )
        scales |= {name: max(scale, scales.get(name, 0.0)) for name, scale in here.items()}
    scales["queries"] = scales["query"]
    return found, truths, scales if case.keys else {**scales, "value": scales["key"]}


# --- what has to hold

EXACTNESS = {"float64": 1e-11, "float32": 1e-5, "bfloat16": 1e-5, "float16": 1e-5}
"""Largest difference as a fraction of the largest entry, before the result is rounded to its dtype: statistics, softmax and
sums of half precision are float32 as well."""

ROUNDING = {torch.float64: 0.0, torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""One rounding of a number of a dtype, as a fraction of it; that of the wider ones is within `EXACTNESS`."""

WEIGHTS = 2e-3
"""Largest difference of a weight where sources have half precision. γ·q folded in half precision would move weights by 1e-2."""

UNIT = {"float64": 2**-51, "float32": 2**-22, "bfloat16": 2**-22, "float16": 2**-22}
"""Some roundings of a statistic, as a fraction of what it would be without cancellation (`uncancelled`)."""


def compare(
    case: Case, implementation: str, device: torch.device, found: Answer, truth: Answer, scales: Mapping[str, float]
) -> None:
    """Raises:
    CheckFailed: `found` is not what it has to be.
    """
    exactness, rounding = EXACTNESS[case.dtype], ROUNDING[getattr(torch, case.dtype)]
    # a rounding for each gradient that a tensor gets, as those are added up in its own dtype, and one of the sum
    added = case.queries if isinstance(case, ReadCase) else 2 * (case.complete + case.partial)
    gradient_exactness = exactness + rounding * (1 + added)
    # of a partial read, what is kept for the gradient is what is kept anyway: rounded to the sources' dtype
    unit = UNIT[case.dtype] + (rounding if isinstance(case, PartialCase) else 0.0)

    def check(what: str, got: Tensor, exact: Tensor, allowed: Tensor | float) -> None:
        if got.shape != exact.shape:
            raise CheckFailed(
                f"{implementation} on {device}, {case}: {what} has the shape {tuple(got.shape)}, allowed: {tuple(exact.shape)}"
            )
        difference = (got.double() - exact.double()).abs()
        excess = difference - allowed
        if not bool((excess <= 0).all()):
            worst = int(excess.nan_to_num(nan=torch.inf).argmax())
            limit = allowed.expand_as(difference).flatten()[worst].item() if isinstance(allowed, Tensor) else allowed
            raise CheckFailed(
                f"{implementation} on {device}, {case}: {what} differs by {difference.flatten()[worst].item():.3g}, "
                f"allowed: {limit:.3g}"
            )

    for index, (got, exact) in enumerate(zip(found.reads, truth.reads, strict=True)):
        allowed = rounding * exact.abs() + exactness * largest(exact)
        check(f"read {index}", got, exact, allowed)
    for index, (got, exact) in enumerate(zip(found.weights, truth.weights, strict=True)):
        check(f"weights {index}", got, exact, WEIGHTS if rounding else exactness)
    for name, exact in truth.gradients.items():
        kind = next(word for word in name.split() if not word.isdecimal())
        limit = gradient_exactness * largest(exact) + unit * scales.get(kind, 0.0)
        check(f"gradient of {name}", found.gradients[name], exact, limit)


__all__ = [
    "IMPLEMENTATIONS",
    "Case",
    "PartialCase",
    "ReadCase",
    "every_case",
    "implementations_for",
    "pairwise_cases",
    "run_case",
]
