# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""From a stock checkpoint to a DepthRoute one, and the proof that nothing changed.

source.py        open and check what is converted: a folder, a hub id or a .gguf file
weights.py       what a folder's safetensors files hold, checked by their headers
keys.py          which tensor goes where: rules as data, invertible
experts.py       sparse experts: fused, or one tensor each
conversion.py    `convert`
verification.py  `verify`
folder.py        an output folder that appears whole or not at all
tokenizer.py     the tokenizer, kept and checked
card.py          the model card
reports.py       what both functions return
"""

from .conversion import convert
from .reports import ConversionReport, VerificationReport
from .verification import verify


__all__ = ["ConversionReport", "VerificationReport", "convert", "verify"]
