# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""From a stock checkpoint to a DepthRoute one, and the proof that nothing changed.

source.py        open and check what is converted: a folder, a hub id or a .gguf file (gguf_source.py); fp8.py: with scales
source_config.py the configuration of a source, and what is refused by it; architectures.py: which class takes whose place
weights.py       what a folder's safetensors files hold, read one tensor at a time; headers.py: their headers, checked strictly
hashes.py        SHA-256 of files, and where a source says what they ought to be
keys.py          which tensor goes where: rules as data, invertible
experts.py       sparse experts: fused, or one tensor each
conversion.py    `convert`
writing.py       weights, written tensor by tensor into shards
unfinished.py    work that may be interrupted, and goes on from its finished shards
verification.py  `verify`: probes.py: on what, and the negative control; routing.py: our models without their weights
layerwise.py     a model's own forward with one layer in memory; memory.py: how much there is
reversion.py     `revert`; way_back.py: what a conversion notes for it
routed.py        sources with routing of their own: represet.py our family's, imported.py other people's AttnRes
folder.py        what an output folder may be, and one that appears whole or not at all; progress.py: the bar
side_files.py    what travels beside the weights, and what stays behind; tokenizer.py: the tokenizer, kept and checked
card.py          the model card, made of what commands wrote: record.py, evaluations.py, training_record.py, card_metadata.py
publishing.py    `push`; publishable.py: whether a folder may be published
reports.py       what `convert` and `verify` return
"""

from .card import refresh_card
from .conversion import convert
from .publishing import PushOptions, PushReport, push
from .reports import ConversionReport, VerificationReport
from .reversion import RevertReport, revert
from .verification import verify


__all__ = [
    "ConversionReport",
    "PushOptions",
    "PushReport",
    "RevertReport",
    "VerificationReport",
    "convert",
    "push",
    "refresh_card",
    "revert",
    "verify",
]
