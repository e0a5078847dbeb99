# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Reads that are measured alone: what is asked for, tensors, equations in float64, and the fewest bytes that must move.

Dimension letters: B batch, T tokens, D width, S sources that all reads of a case see, M reads of a case.

    full    one read of S sources, as before every sublayer of a Full or Delta model: M = 1
    block   the M reads of one block: all see its S completed sources, each but the first also the running sum before it
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthroute.errors import Refused

from ..dispatch import BACKENDS
from .machine import check_device
from .settings import DTYPES, check_choices, check_numbers, command_line


SCHEDULES = ("full", "block")
FORMS = ("plain", "added", "anchored")
"""Plain weights without a base (`attnres`), plain weights on a base (`delta`), anchored weights on a base."""

IMPLEMENTATIONS = ("reference", *BACKENDS)
EPS = 1e-6


@dataclass(frozen=True)
class OperatorSettings:
    """What is measured of single reads.

    Attributes:
        sources: S of the cases.
        schedules: of `SCHEDULES`.
        forms: of `FORMS`.
        queries: M of block cases.
        width: D.
        batch, tokens: B and T.
        dtype: of sources and parameters.
        device: cpu, cuda or cuda:N.
        implementations: ours; those that cannot run are listed with the reason.
        peers: measure other libraries too.
        threads: of torch.
        repeats, warmup: rounds that count, and rounds before them.
        copy_mib: size of the copy that measures what memory can do; more than the caches hold.
        seed: of tensors.
    """

    sources: tuple[int, ...] = (4, 8, 16, 32, 57)
    schedules: tuple[str, ...] = SCHEDULES
    forms: tuple[str, ...] = ("plain", "anchored")
    queries: int = 8
    width: int = 256
    batch: int = 2
    tokens: int = 256
    dtype: str = "float32"
    device: str = "cpu"
    implementations: tuple[str, ...] = IMPLEMENTATIONS
    peers: bool = True
    threads: int = 1
    repeats: int = 15
    warmup: int = 3
    copy_mib: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.sources:
            raise Refused("sources: got none, allowed: numbers ≥ 1")
        check_choices("schedules", self.schedules, SCHEDULES)
        check_choices("forms", self.forms, FORMS)
        check_choices("implementations", self.implementations, IMPLEMENTATIONS)
        check_choices("dtype", (self.dtype,), tuple(DTYPES))
        check_numbers(self)
        check_device(self.device)

    def command(self) -> str:
        """The command line that repeats this."""
        return command_line("depthroute bench operator", self).replace("--peers False", "--no-peers")

    def cases(self) -> list["OperatorCase"]:
        """Every schedule, form and number of sources."""
        return [
            OperatorCase(
                schedule,
                form,
                sources,
                1 if schedule == "full" else self.queries,
                self.width,
                self.batch,
                self.tokens,
                self.dtype,
                self.device,
            )
            for schedule in dict.fromkeys(self.schedules)
            for form in dict.fromkeys(self.forms)
            for sources in dict.fromkeys(self.sources)
        ]


class OperatorCase(NamedTuple):
    """One read, or the reads of one block."""

    schedule: str
    form: str
    sources: int
    queries: int
    width: int
    batch: int
    tokens: int
    dtype: str
    device: str

    @property
    def name(self) -> str:
        """schedule form S=…"""
        return f"{self.schedule} {self.form} S={self.sources}"

    @property
    def anchored(self) -> bool:
        return self.form == "anchored"

    @property
    def based(self) -> bool:
        return self.form != "plain"

    @property
    def gain(self) -> float:
        """Of every read: 1. A model's own gain is a number, which costs nothing."""
        return 1.0

    def minimum_bytes(self) -> dict[str, int]:
        """The fewest bytes that must move, where caches hold nothing: `forward` reads every source, running sum and base once
        and writes every result once; `backward` reads every result's gradient, every source and running sum once and writes
        their gradients once (a base's gradient is the result's own). Numbers per token and parameters are not counted."""
        tensor = self.batch * self.tokens * self.width * DTYPES[self.dtype].itemsize
        read = self.sources + self.queries - 1
        based = self.queries if self.based else 0
        return {
            "forward": tensor * (read + based + self.queries),
            "backward": tensor * (self.queries + 2 * read),
        }


class ReadInputs(NamedTuple):
    """Tensors of a case, all of which get gradients.

    Attributes:
        values: S sources [B, T, D].
        partials: M − 1 running sums [B, T, D]: the second read sees the first, and so on.
        bases: M tensors [B, T, D], or none.
        query: [M, D].
        key_norm: γ [D], ones: libraries without it can then fold it into the query without a rounding error.
        grads: M gradients of the results [B, T, D]; these get none themselves.
    """

    values: list[Tensor]
    partials: list[Tensor]
    bases: list[Tensor]
    query: Tensor
    key_norm: Tensor
    grads: list[Tensor]

    @property
    def leaves(self) -> dict[str, Tensor]:
        """What gets gradients, by name."""
        lists = {"value": self.values, "partial": self.partials, "base": self.bases}
        named = {f"{name} {index}": tensor for name, tensors in lists.items() for index, tensor in enumerate(tensors)}
        return {**named, "query": self.query, "key_norm": self.key_norm}

    def exact(self, tokens: slice) -> "ReadInputs":
        """Some of the tokens, [n, D], once more in float64."""

        def wide(tensors: Sequence[Tensor], gradients: bool = True) -> list[Tensor]:
            return [t.detach().flatten(0, -2)[tokens].double().requires_grad_(gradients) for t in tensors]

        query, key_norm = (parameter.detach().double().requires_grad_() for parameter in (self.query, self.key_norm))
        return ReadInputs(
            wide(self.values), wide(self.partials), wide(self.bases), query, key_norm, wide(self.grads, gradients=False)
        )


def make_inputs(case: OperatorCase, seed: int) -> ReadInputs:
    """Random tensors of a case on its device, the same for a seed."""
    generator = torch.Generator(case.device).manual_seed(seed)
    dtype = DTYPES[case.dtype]

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator, device=case.device) * scale).to(dtype)

    def leaves(count: int) -> list[Tensor]:
        return [random(case.batch, case.tokens, case.width).requires_grad_() for _ in range(count)]

    return ReadInputs(
        leaves(case.sources),
        leaves(case.queries - 1),
        leaves(case.queries if case.based else 0),
        random(case.queries, case.width, scale=1.5 * case.width**-0.5).requires_grad_(),
        torch.ones(case.width, dtype=dtype, device=case.device, requires_grad=True),
        [random(case.batch, case.tokens, case.width) for _ in range(case.queries)],
    )


def sources_of(inputs: ReadInputs, m: int) -> list[Tensor]:
    """What read `m` sees."""
    return inputs.values if m == 0 else [*inputs.values, inputs.partials[m - 1]]


def by_equations(case: OperatorCase, inputs: ReadInputs) -> list[Tensor]:
    """The M results [B, T, D], step by step on stacked sources, in the dtype of the inputs."""
    results = []
    for m in range(case.queries):
        stack = torch.stack(sources_of(inputs, m))
        normed = stack / torch.sqrt(stack.square().mean(-1, keepdim=True) + EPS)
        weights = torch.softmax((normed * (inputs.query[m] * inputs.key_norm)).sum(-1, keepdim=True), 0)
        if case.anchored:
            weights = weights - 1 / len(stack)
        mix = case.gain * (weights * stack).sum(0)
        results.append(inputs.bases[m] + mix if case.based else mix)
    return results


def with_gradients(results: Sequence[Tensor], inputs: ReadInputs) -> dict[str, Tensor]:
    """Results and the gradients of everything, by name; zeros where none arrives."""
    grads = [grad.to(result.dtype) for grad, result in zip(inputs.grads, results)]
    leaves = list(inputs.leaves.values())
    found = torch.autograd.grad(list(results), leaves, grads, allow_unused=True, materialize_grads=True)
    return {
        **{f"read {m}": result.detach() for m, result in enumerate(results)},
        **{f"gradient of {name}": gradient for name, gradient in zip(inputs.leaves, found)},
    }


NUMBERS_AT_ONCE = 2**25
"""In all stacks of sources of a case, while it is evaluated in float64."""


OF_PARAMETERS = ("gradient of query", "gradient of key_norm")


def in_float64(case: OperatorCase, inputs: ReadInputs) -> dict[str, Tensor]:
    """`with_gradients` of the equations in float64, some tokens at a time: tokens do not see each other."""
    count = case.batch * case.tokens
    step = max(1, NUMBERS_AT_ONCE // (case.queries * (case.sources + 1) * case.width))
    truth: dict[str, Tensor] = {}
    for begin in range(0, count, step):
        tokens = slice(begin, min(begin + step, count))
        exact = inputs.exact(tokens)
        for name, tensor in with_gradients(by_equations(case, exact), exact).items():
            if name in OF_PARAMETERS:
                truth[name] = truth[name] + tensor if name in truth else tensor
            else:
                if name not in truth:
                    truth[name] = tensor.new_empty(count, case.width)
                truth[name][tokens] = tensor
    shape = (case.batch, case.tokens, case.width)
    return {name: tensor if name in OF_PARAMETERS else tensor.view(shape) for name, tensor in truth.items()}


TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Largest difference as a fraction of the largest entry: two roundings of a result; in the wider dtypes orders of sums."""


def largest_difference(
    found: dict[str, Tensor], truth: dict[str, Tensor], case: OperatorCase
) -> tuple[float, str | None]:
    """The largest difference as a fraction of the largest entry, and None or, in words, what is wrong.

    A gradient may have one rounding more for each of the M reads that add to it, and both its own.
    """
    dtype, worst, wrong = DTYPES[case.dtype], 0.0, None
    for name, exact in truth.items():
        got = found[name]
        if got.shape != exact.shape:
            return float("inf"), f"{name} has the shape {tuple(got.shape)}, not {tuple(exact.shape)}"
        allowed = TOLERANCE[dtype]
        if name.startswith("gradient") and dtype.itemsize == 2:
            allowed *= 1 + case.queries / 2
        difference = ((got.double() - exact).abs().max() / exact.abs().max()).item()
        if not difference <= allowed and wrong is None:
            wrong = f"{name} differs by {difference:.3g} from float64, allowed: {allowed:.3g}"
        worst = max(worst, difference if difference == difference else float("inf"))
    return worst, wrong


Read = Any
"""Callable[[ReadInputs], list[Tensor]]: the M results of a case."""
