# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What a conversion did and what a verification found, as data, as table rows, and as a verdict."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from depthroute import DepthRouteConfig
from depthroute.errors import CheckFailed
from depthroute.modeling.configuration_depthroute import HOSTING_FIELDS, MEANT_FOR, family_fields

from .keys import listed


CONTROL_KINDS = {"query": "one routing query", "gate_bias": "one gate", "mlp_scale": "one scale"}
"""What the negative control changed, in words, by the last part of its name."""


def read_fields(config: DepthRouteConfig) -> list[str]:
    """The routing fields that mean something for this residual; what hosts the backbone says nothing about routing."""
    routing = [name for name in family_fields() if name not in HOSTING_FIELDS]
    return [name for name in routing if config.residual_type in MEANT_FOR.get(name, (config.residual_type,))]


@dataclass(frozen=True)
class VerificationReport:
    """A converted folder against its source, on fixed token ids.

    Attributes:
        source: the source's label.
        converted: the folder's name.
        preset: the preset that its fields spell.
        equality_promised: the logits must be the source's, bit for bit: anchored (but for mHC) or standard.
        dtype: the type that both were computed in, the output's.
        probes: shapes [B, T] of the token ids.
        max_abs_difference: max |Δlogits|.
        logits_std: standard deviation of the source's logits.
        bitwise_equal: whether every logit is equal.
        perturbed: the parameter that the negative control changed.
        control_difference: max |Δlogits| against the source with it changed.
        control_differs: whether that changed the converted model's logits.
        trained_routing: routing parameters that are not at their initial values.
        changed: other parameters that are not the source's.
        allowed_gap: how far the logits may be from the source's, in standard deviations of them: 0 where equality is promised,
            infinity where any gap is only reported.
    """

    source: str
    converted: str
    preset: str
    equality_promised: bool
    dtype: str
    probes: list[list[int]]
    max_abs_difference: float
    logits_std: float
    bitwise_equal: bool
    perturbed: str
    control_difference: float
    control_differs: bool
    trained_routing: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    allowed_gap: float = math.inf

    @property
    def relative_difference(self) -> float:
        """max |Δlogits| in standard deviations of the source's logits."""
        return self.max_abs_difference / self.logits_std if self.logits_std else math.inf

    @property
    def gap(self) -> str:
        """The difference, in words."""
        return (
            f"max |Δlogits| {self.max_abs_difference:.3g} ({self.relative_difference:.3g} of their std), {self.dtype}"
        )

    @property
    def verdict(self) -> str:
        """One phrase: trained routing, bitwise equal, or not equal to the source at step 0."""
        if self.trained_routing:
            return "trained routing"
        if self.bitwise_equal:
            return "bitwise equal to the source"
        if self.relative_difference <= self.allowed_gap < math.inf:
            return "the source's function, up to rounding and the rms eps"
        return "not equal to the source at step 0"

    def failure(self, allow_gap: bool = False) -> str | None:
        """Why this counts as failed, on one line; None where it does not.

        Args:
            allow_gap: accept the gap at step 0 where equality was not promised, as long as nothing else differs.
        """
        moved = ""
        if self.changed:
            moved = f"; {len(self.changed)} other parameters are not the source's: {listed(self.changed)}"
        if self.trained_routing:
            names = listed(self.trained_routing)
            return f"{self.converted}: trained routing: {len(self.trained_routing)} parameters have moved: {names}; {self.gap}{moved}"
        if not math.isfinite(self.max_abs_difference):
            return f"{self.converted}: logits: got values that are not finite, allowed: finite ones{moved}"
        if not self.control_differs:
            return f"{self.converted}: negative control: changing {self.perturbed} changed no logit, allowed: some difference"
        if self.changed:
            return f"{self.converted}: {self.verdict}: {self.gap}{moved}"
        if self.bitwise_equal or self.relative_difference <= self.allowed_gap < math.inf:
            return None
        if 0 < self.allowed_gap < math.inf:
            return f"{self.converted}: {self.verdict}: {self.gap}; allowed: {self.allowed_gap:g} of their std"
        if allow_gap and not self.equality_promised:
            return None
        allowed = "bitwise equality"
        if not self.equality_promised:
            allowed += ", or --allow-gap for a conversion that does not promise it"
        return f"{self.converted}: {self.verdict}: {self.gap}; allowed: {allowed}"

    def check(self, allow_gap: bool = False) -> None:
        """
        Raises:
            CheckFailed: `failure(allow_gap)`, where there is one.
        """
        if (reason := self.failure(allow_gap)) is not None:
            raise CheckFailed(reason)

    def rows(self) -> list[tuple[str, str]]:
        """Label and value, for printing."""
        kind = CONTROL_KINDS.get(self.perturbed.rpartition(".")[2], "one weight (no routing here)")
        return [
            ("result", self.verdict),
            ("max |Δlogits|", f"{self.max_abs_difference:.6g} ({self.relative_difference:.3g} of their std)"),
            ("bitwise equal", "yes" if self.bitwise_equal else "no"),
            (f"negative control, {kind} perturbed", f"max |Δlogits| {self.control_difference:.6g} ({self.perturbed})"),
            ("probe", f"{', '.join(f'{b} x {t}' for b, t in self.probes)} fixed token ids, {self.dtype}"),
        ]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        found = {"relative_difference": self.relative_difference, "verdict": self.verdict, "rows": self.rows()}
        return {**asdict(self), **found}


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion wrote.

    Attributes:
        source: the source's label.
        out: the output folder.
        preset: the preset that its fields spell: not the one asked for, where a field contradicts that.
        settings: the routing fields that mean something for this residual.
        dtype: the configuration's type.
        copied_tensors, copied_parameters: taken from the source.
        added_tensors, added_parameters: of the routing.
        live_reads: how many depth reads have a choice; none where the residual has no such reads.
        inert_reads: module paths of those with a single source: they read the stream, and have no query.
        kept_files: tokenizer, chat template, generation configuration, licence.
        left_files: what else was in the source's folder, and stayed there.
        warnings: about kept files, one line each.
        decisions: what was decided about the source that its configuration does not say, one line each.
        requested: the arguments that were given to `convert`.
        verification: None where it was not asked for.
    """

    source: str
    out: str
    preset: str
    settings: dict[str, Any]
    dtype: str
    copied_tensors: int
    copied_parameters: int
    added_tensors: int
    added_parameters: int
    live_reads: int
    inert_reads: list[str]
    kept_files: list[str]
    left_files: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    decisions: list[str] = field(default_factory=list)
    requested: dict[str, Any] = field(default_factory=dict)
    verification: VerificationReport | None = None

    def rows(self) -> list[tuple[str, str]]:
        """Label and value, for printing."""
        settings = ", ".join(f"{key} = {value}" for key, value in self.settings.items())
        reads = [
            ("live reads", str(self.live_reads)),
            ("inert reads (one source)", ", ".join(self.inert_reads) or "none"),
        ]
        return [
            ("source", self.source),
            ("preset", f"{self.preset}: {settings}"),
            ("dtype", self.dtype),
            ("parameters copied", f"{self.copied_parameters:,} in {self.copied_tensors} tensors"),
            ("parameters added", f"{self.added_parameters:,} in {self.added_tensors} tensors"),
            *(reads if self.live_reads else []),
            ("kept files", ", ".join(self.kept_files) or "none"),
            *([("left behind", listed(self.left_files))] if self.left_files else []),
            *(("warning", text) for text in self.warnings),
            *(("decided", text) for text in self.decisions),
        ]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        values = {item: getattr(self, item) for item in self.__dataclass_fields__}
        verification = None if self.verification is None else self.verification.to_dict()
        return {**values, "rows": self.rows(), "verification": verification}
