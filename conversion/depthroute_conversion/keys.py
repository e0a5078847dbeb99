# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Which tensor of a source becomes which tensor of ours: rules as data, each with an inverse.

Our names are Qwen3's and Qwen3-MoE's, and those of the other backbones are the same, so that a conversion copies every tensor
under its own name and adds those of the routing. Prefixes that were saved otherwise are renamed (`Architecture.rules`).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from depthroute.errors import Refused

from .experts import in_layout_of


_PLACEHOLDERS = {"layer": r"\d+", "rest": r".+"}
_SHOWN = 8


@dataclass(frozen=True)
class Rename:
    """One family of names on both sides, such as `Rename("h.{layer}.ln.{rest}", "layers.{layer}.norm.{rest}")`.

    Placeholders: `{layer}` (a number) and `{rest}` (everything that follows). Both sides name the same ones, which is
    what makes a rule invertible.

    Raises:
        ValueError: the two sides name different placeholders, or one twice.
    """

    source: str
    ours: str

    def __post_init__(self) -> None:
        names = [re.findall(r"{(\w+)}", side) for side in (self.source, self.ours)]
        if sorted(names[0]) != sorted(names[1]) or len(set(names[0])) != len(names[0]):
            raise ValueError(
                f"Rename: got {self.source!r} and {self.ours!r}, allowed: the same placeholders, each once"
            )

    def to_ours(self, key: str) -> str | None:
        """The key's name with us, or None where the rule does not apply to it."""
        return _translate(key, self.source, self.ours)

    def to_source(self, key: str) -> str | None:
        """The inverse of `to_ours`."""
        return _translate(key, self.ours, self.source)


def _translate(key: str, pattern: str, replacement: str) -> str | None:
    expression = re.sub(r"\\{(\w+)\\}", lambda match: f"(?P<{match[1]}>{_PLACEHOLDERS[match[1]]})", re.escape(pattern))
    match = re.fullmatch(expression, key)
    return None if match is None else replacement.format(**match.groupdict())


@dataclass(frozen=True)
class KeyRules:
    """A backbone's names against ours.

    Attributes:
        renames: the first rule that applies gives the name; a key without one keeps its own.
        derived: regular expressions of source keys that are no weights: computed from the configuration, never written.
        tied: our key → the key whose tensor it shares under `tie_word_embeddings`; a checkpoint may hold it or not.
    """

    renames: tuple[Rename, ...] = ()
    derived: tuple[str, ...] = ()
    tied: Mapping[str, str] = field(default_factory=lambda: {"lm_head.weight": "model.embed_tokens.weight"})

    def to_ours(self, key: str) -> str:
        """Our name of a source's key."""
        return next((name for rule in self.renames if (name := rule.to_ours(key)) is not None), key)

    def to_source(self, key: str) -> str:
        """The source's name of our key: the inverse of `to_ours`."""
        return next((name for rule in self.renames if (name := rule.to_source(key)) is not None), key)

    def is_derived(self, key: str) -> bool:
        """Whether a source's key is no weight."""
        return any(re.fullmatch(pattern, key) for pattern in self.derived)


@dataclass(frozen=True)
class KeyPlan:
    """What becomes of every tensor.

    Attributes:
        copied: our key → the source's key. Experts are in the source's layout, fused or apart.
        added: our keys that no stock checkpoint has, the parameters of the routing.
        shared: our key → our key, for a tied head that the source spells out.
    """

    copied: dict[str, str]
    added: list[str]
    shared: dict[str, str]


def listed(names: Iterable[str]) -> str:
    """Names for one line: all of them, or the first few and how many more."""
    items = list(names)
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more


def plan_keys(
    where: str,
    source: Mapping[str, tuple[int, ...]],
    ours: Mapping[str, tuple[int, ...]],
    routing: Iterable[str],
    rules: KeyRules,
    tied: bool,
) -> KeyPlan:
    """Match a source's tensors with a model's.

    Args:
        where: what the source is called in messages.
        source: shapes by the source's keys.
        ours: shapes by the model's keys, those of the routing included.
        routing: the keys of the routing.
        rules: the backbone's rules.
        tied: whether the model ties its word embeddings.

    Raises:
        Refused: keys missing from the source, keys that the model has no place for, or shapes that differ from what the
            configuration says; the message lists them.
    """
    added = [key for key in ours if key in set(routing)]
    shared = {key: to for key, to in rules.tied.items() if tied}
    found = {rules.to_ours(key): key for key in source if not rules.is_derived(key)}
    ours = in_layout_of(found, ours)
    expected = {key for key in ours if key not in shared} - set(added)
    doubled = [key for key in source if not rules.is_derived(key) and found[rules.to_ours(key)] != key]
    if doubled:
        raise Refused(f"{where}: {listed(doubled)}: got two keys for one tensor of the model, allowed: one")
    spelled_out = {key: to for key, to in shared.items() if key in found}

    missing = sorted(rules.to_source(key) for key in expected - set(found))
    unexpected = sorted(found[key] for key in set(found) - expected - set(spelled_out))
    problems = [f"{len(missing)} missing keys: {listed(missing)}"] if missing else []
    problems += [f"{len(unexpected)} unexpected keys: {listed(unexpected)}"] if unexpected else []
    if problems:
        raise Refused(f"{where}: {'; '.join(problems)}; allowed: exactly the keys that its configuration implies")

    wrong = [
        f"{found[key]}: got {list(source[found[key]])}, allowed: {list(ours[key])}"
        for key in (*sorted(expected), *spelled_out)
        if tuple(source[found[key]]) != tuple(ours[key])
    ]
    if wrong:
        raise Refused(f"{where}: shapes differ from the configuration: {listed(wrong)}")
    return KeyPlan({key: found[key] for key in ours if key in expected}, added, spelled_out)
