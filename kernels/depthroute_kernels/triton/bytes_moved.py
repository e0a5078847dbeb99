# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Bytes that the kernels move to and from memory for one token: counted, not measured.

    python -m depthroute_kernels.triton.bytes_moved --readme kernels/README.md

Each launch counts every byte it loads once, and every byte it stores once; what a program loads again is in cache. Queries,
biases and sums over tokens belong to a launch, not to a token, and are left out. A test counts the same in the interpreter.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

from . import launch


MARK = "<!-- bytes moved: {} -->"


@dataclass(frozen=True)
class Sizes:
    """D, bytes of a number of the sources, H; whether keys are apart, a base is added, the read is anchored."""

    width: int
    itemsize: int = 2
    heads: int = 1
    keys: bool = False
    base: bool = False
    anchored: bool = False

    @property
    def number(self) -> int:
        """Bytes of a statistic."""
        return max(4, self.itemsize)

    @property
    def row(self) -> int:
        """Bytes of a source."""
        return self.width * self.itemsize

    @property
    def sum(self) -> int:
        """Bytes of a numerator, or of U."""
        return self.width * self.number


def phase_forward(sizes: Sizes, count: int, queries: int, complete: int) -> int:
    """S sources read, C reads and M − C numerators written (and U); logits, 1 / rms, Z, c, Z⁰, c⁰."""
    partial, number, heads = queries - complete, sizes.number, sizes.heads
    rows = count * sizes.row * (1 + sizes.keys)
    if sizes.base and complete:
        rows += sizes.row
    rows += complete * (sizes.row if sizes.base else sizes.sum) + partial * sizes.sum
    numbers = count * queries * heads + count + 2 * queries * heads
    if sizes.anchored:
        rows += sizes.sum if partial else 0
        numbers += 2 * heads
    return rows + numbers * number


def phase_backward(
    sizes: Sizes, count: int, queries: int, complete: int, architecture: launch.Architecture | None = None
) -> int:
    """Gradients of C reads, of M − C numerators (and of U) and S sources read, S gradients written; in two launches where M · D
    is large."""
    plan = launch.backward_launch(
        queries, sizes.heads, sizes.width // sizes.heads, architecture or launch.ARCHITECTURES["sm_90"]
    )
    number, heads, partial = sizes.number, sizes.heads, queries - complete
    grads = complete * (sizes.row if sizes.base else sizes.sum) + partial * sizes.sum
    grad_total = sizes.sum if sizes.anchored and partial else 0
    sources, per_logit, per_read = count * sizes.row, count * queries * heads, queries * heads
    prior = 2 * heads if sizes.anchored else 0
    written = sources * (1 + sizes.keys)
    of_sums = per_read if partial else 0
    # logits, gradients of logits (both ways), 1 / rms, pulls, Z, c
    dots = (3 * per_logit + 2 * count + 2 * per_read + of_sums) * number
    if len(plan.steps) == 1:
        return sources * (1 + sizes.keys) + grads + grad_total + written + dots + (count + prior) * number
    apply = sources + grads + grad_total + written + (2 * per_logit + 2 * count + 2 * per_read + prior) * number
    return sources + grads + dots + apply


def merge_forward(sizes: Sizes, count: int) -> int:
    """N (and U), P sources and the base read, x written (and in 16 bits with a base the mix)."""
    number, heads = sizes.number, sizes.heads
    rows = sizes.sum + count * sizes.row * (1 + sizes.keys) + sizes.row
    if sizes.base:
        rows += sizes.row * (2 if sizes.itemsize == 2 else 1)
    numbers = 2 * count * heads + count + 2 * heads
    if sizes.anchored:
        rows += sizes.sum
        numbers += 2 * heads
    return rows + numbers * number


def merge_backward(sizes: Sizes, count: int) -> int:
    """∂x, x or the mix (and the base), P sources (and U) read; gradients of N, P sources (and of U) written."""
    number, heads = sizes.number, sizes.heads
    rows = 2 * sizes.row + 2 * count * sizes.row * (1 + sizes.keys) + sizes.sum
    if sizes.base and sizes.itemsize > 2:
        rows += sizes.row
    numbers = count * heads + count + 3 * heads
    if sizes.anchored:
        rows += 2 * sizes.sum
        numbers += 2 * heads
    return rows + numbers * number


@dataclass(frozen=True)
class Group:
    """The reads of a block, or of some layers: all see S sources; some also `private` ones, of which there are `distinct`.

    Attributes:
        sizes: of everything.
        count: S.
        complete: reads that see nothing else.
        private: how many more each other read sees.
        distinct: how many tensors those are.
    """

    sizes: Sizes
    count: int
    complete: int
    private: tuple[int, ...]
    distinct: int


@dataclass(frozen=True)
class Traffic:
    """Bytes for one token of a group: in two phases, in one fused read for each sublayer, and what must be moved.

    Autograd adds a gradient of a source to those that it had: two loads and a store.
    """

    two_phases: int
    fused: int
    minimum: int


def forward_traffic(group: Group) -> Traffic:
    """Fused: each read loads all that it sees. Minimum: each source, base and x once."""
    sizes, reads = group.sizes, group.complete + len(group.private)
    ends = reads * sizes.row * (1 + sizes.base)
    two = phase_forward(sizes, group.count, reads, group.complete)
    two += sum(merge_forward(sizes, private) for private in group.private)
    fused = sizes.row * (reads * group.count + sum(group.private)) + ends
    return Traffic(two, fused, sizes.row * (group.count + group.distinct) + ends)


def backward_traffic(group: Group) -> Traffic:
    """Fused: each read loads all that it sees and ∂x, and stores a gradient for all that it sees. Minimum: each source, ∂x and
    gradient once."""
    sizes, reads = group.sizes, group.complete + len(group.private)
    again = sum(group.private) - group.distinct
    two = phase_backward(sizes, group.count, reads, group.complete) + 3 * sizes.row * (group.count + again)
    two += sum(merge_backward(sizes, private) for private in group.private)
    seen = reads * group.count + sum(group.private)
    fused = sizes.row * (2 * seen + reads + 3 * (reads * group.count + again))
    return Traffic(two, fused, sizes.row * (2 * (group.count + group.distinct) + reads))


GROUPS = {
    "`attnres-block`, block 5": Group(Sizes(1024), 5, 1, (1,) * 7, 7),
    "`attnres-block`, block 5, anchored": Group(Sizes(1024, base=True, anchored=True), 5, 1, (1,) * 7, 7),
    "`attnres-block`, block 5, D = 4096": Group(Sizes(4096), 5, 1, (1,) * 7, 7),
    "`attnres` (Full), layers 15 to 17": Group(Sizes(1024), 29, 1, (1, 2, 3, 4, 5), 5),
    "`delta`, layers 15 to 17": Group(Sizes(1024, base=True), 29, 1, (1, 2, 3, 4, 5), 5),
}


def as_table() -> str:
    """KiB for each token of a group of reads, bf16: forward + backward."""
    lines = ["| group of reads | two phases | one fused read each | minimum |", "|---|---|---|---|"]
    for name, group in GROUPS.items():
        both = (forward_traffic(group), backward_traffic(group))
        cells = [
            " + ".join(f"{getattr(traffic, field) / 1024:.0f}" for traffic in both)
            for field in ("two_phases", "fused", "minimum")
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the table, or put it into a file."""
    from .compile_ahead import write_between

    parser = argparse.ArgumentParser(description="Bytes that the depth read kernels move, counted.")
    parser.add_argument("--readme", type=Path, help="file whose table is replaced")
    arguments = parser.parse_args()
    if arguments.readme:
        write_between(arguments.readme, MARK, as_table())
    else:
        print(as_table(), end="")


if __name__ == "__main__":
    main()
