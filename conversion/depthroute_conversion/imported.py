# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Other people's AttnRes checkpoints, whose routing comes along: two origins, each a table row of renames and a reading of its
configuration.

    `qwen3_attnres`   Qwen3, with the modules attn_res_proj, attn_res_norm, mlp_res_proj, mlp_res_norm in every layer, and
                      final_res_proj, final_res_norm; blocks of ceil(L / attnres_num_blocks) layers
    `transformer`     flash-linear-attention's, with the same modules in every layer, and res_proj, res_norm;
                      blocks of attnres_block_size sublayers

A `…_proj` is a query [1, D], a `…_norm` its γ [D] with the eps of the other norms. In both, read s sees the embedding, the
sums of the completed blocks and the running sum, the embedding being a block of its own; so does the final read, and what it
gives goes through the final norm (arXiv 2603.15031, and the public code of both). The read of the first attention has one
source: its query and norm are in the files, have no effect, and are left out.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from depthroute import DepthRouteConfig
from depthroute.errors import Refused, one_line
from depthroute.modeling.depth_schedule import live_reads, read_count, read_name

from .architectures import ARCHITECTURES, Architecture
from .imported_reference import AttnResReference
from .keys import KeyRules, Rename, listed
from .routed import EXPORT_GAP, ROUNDING_GAP, RoutedSource
from .source import FolderSource
from .source_config import check_code
from .weights import StoredTensor, read_headers


@dataclass(frozen=True)
class Hosted:
    """What a foreign configuration says, in our terms.

    Attributes:
        config: of the stock backbone.
        architecture: the stock class whose branches compute what theirs do.
        preset: the preset of the routing.
        fields: further routing fields.
        unit: sublayers of a block.
        adds: whether a read is added to the stream.
    """

    config: PreTrainedConfig
    architecture: Architecture
    preset: str
    fields: dict[str, Any]
    unit: int
    adds: bool = False


@dataclass(frozen=True)
class Origin:
    """One kind of foreign checkpoint.

    Attributes:
        name: what to call it.
        renames: its keys against ours.
        read_config: its configuration's file and entries, in our terms.
    """

    name: str
    renames: tuple[Rename, ...]
    read_config: Callable[[Path, dict[str, Any]], Hosted]


def _reads(final: str) -> tuple[Rename, ...]:
    pairs = [
        *((f"model.layers.{{layer}}.{name}_res", f"model.layers.{{layer}}.{name}_read") for name in ("attn", "mlp")),
        (f"model.{final}", "model.final_read"),
    ]
    parts = (("proj", "query"), ("norm", "key_norm"))
    return tuple(
        Rename(f"{theirs}_{part}.weight", f"{ours}.{parameter}") for theirs, ours in pairs for part, parameter in parts
    )


# -- qwen3_attnres ----------------------------------------------------------------------------------------------------

_MODES = {"block": "attnres-block", "full": "attnres", "delta": "delta"}
_NO_EFFECT = {  # only read in modes that are refused, or by training
    "attnres_num_heads", "attnres_hyper_n", "attnres_recency_bias_init", "attnres_init_bias", "attnres_gate_init",
}  # fmt: skip


def _read_qwen3_attnres(path: Path, entries: dict[str, Any]) -> Hosted:
    own = {key: value for key, value in entries.items() if key.startswith("attnres_")}
    for key, neutral in (("attnres_gate_type", "bias"), ("attnres_use_null_source", False)):
        if own.pop(key, neutral) != neutral:
            raise Refused(f"{path}: {key}: got {entries[key]!r}, allowed: {neutral!r}, other reads cannot be hosted")
    mode, blocks = own.pop("attnres_mode", "block"), own.pop("attnres_num_blocks", 8)
    if mode not in _MODES:
        raise Refused(f"{path}: attnres_mode: got {mode!r}, allowed: {', '.join(_MODES)}")
    if type(blocks) is not int or blocks < 1:
        raise Refused(f"{path}: attnres_num_blocks: got {blocks!r}, allowed: a whole number ≥ 1")
    if unknown := sorted(set(own) - _NO_EFFECT):
        raise Refused(f"{path}: {unknown[0]}: got {own[unknown[0]]!r}, an entry of an unknown origin; allowed: none")
    rest = {key: value for key, value in entries.items() if not key.startswith("attnres_")}
    config = _config(path, Qwen3Config, rest)
    size = max(1, -(-config.num_hidden_layers // blocks))
    fields = {"depth_block_size": size} if mode == "block" else {}
    unit = 2 * size if mode == "block" else 1
    return Hosted(config, ARCHITECTURES["Qwen3ForCausalLM"], _MODES[mode], fields, unit, adds=mode == "delta")


# -- flash-linear-attention -------------------------------------------------------------------------------------------

_FLA_QK_NORM_EPS = 1e-5
_FLA_DEFAULTS: dict[str, Any] = {
    "hidden_size": 2048, "num_hidden_layers": 24, "num_heads": 32, "num_kv_heads": None, "qkv_bias": False, "qk_norm": False,
    "window_size": None, "rope_theta": 10000.0, "max_position_embeddings": 2048, "hidden_ratio": 4,
    "intermediate_size": None, "hidden_act": "swish", "norm_eps": 1e-6, "vocab_size": 32000, "attnres_block_size": None,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None, "tie_word_embeddings": False, "initializer_range": 0.02,
}  # fmt: skip


def _read_fla(path: Path, entries: dict[str, Any]) -> Hosted:
    given: dict[str, Any] = {key: entries.get(key, default) for key, default in _FLA_DEFAULTS.items()}
    layers, width, heads = (given[key] for key in ("num_hidden_layers", "hidden_size", "num_heads"))
    for key in ("num_hidden_layers", "hidden_size", "num_heads"):
        if type(given[key]) is not int or given[key] < 1:
            raise Refused(f"{path}: {key}: got {given[key]!r}, allowed: a whole number ≥ 1")
    size = given["attnres_block_size"]
    whole = type(size) is int and size > 0 and (size == 1 or size >= 2 * layers or size % 2 == 0)
    if not whole:
        raise Refused(
            f"{path}: attnres_block_size: got {size!r}, allowed: 1, or an even number of sublayers (blocks are whole layers here)"
        )
    hosted_only: dict[str, tuple[bool, str]] = {
        "hidden_act": (given["hidden_act"] in ("swish", "silu"), "'swish'"),
        "window_size": (given["window_size"] is None or type(given["window_size"]) is int, "a whole number, or none"),
        "qkv_bias": (not (given["qkv_bias"] and given["qk_norm"]), "False with qk_norm"),
        "rope_theta": (type(given["rope_theta"]) in (int, float), "a number, rotary positions"),
        "num_heads": (width % heads == 0, f"a divisor of hidden_size = {width}"),
        "norm_eps": (
            not given["qk_norm"] or given["norm_eps"] == _FLA_QK_NORM_EPS,
            f"{_FLA_QK_NORM_EPS} with qk_norm, whose norms have that eps",
        ),
    }
    for key, (holds, allowed) in hosted_only.items():
        if not holds:
            raise Refused(f"{path}: {key}: got {given[key]!r}, allowed: {allowed}; the backbone hosts no other exactly")
    intermediate = given["intermediate_size"]
    if intermediate is None:
        intermediate = -(-int(width * (given["hidden_ratio"] or 4) * 2 / 3) // 256) * 256
    carried = (
        "hidden_size", "num_hidden_layers", "max_position_embeddings", "vocab_size", "bos_token_id", "eos_token_id",
        "pad_token_id", "tie_word_embeddings", "initializer_range", "rope_theta",
    )  # fmt: skip
    stock: dict[str, Any] = {
        **{key: given[key] for key in carried},
        **{key: entries[key] for key in ("dtype", "torch_dtype") if key in entries},
        "num_attention_heads": heads,
        "num_key_value_heads": given["num_kv_heads"] or heads,
        "head_dim": width // heads,
        "intermediate_size": intermediate,
        "hidden_act": "silu",
        "rms_norm_eps": given["norm_eps"],
    }
    window = given["window_size"]
    every_layer = {"use_sliding_window": window is not None, "sliding_window": window, "max_window_layers": 0}
    # the stock class whose attention has just these norms, biases and window
    if given["qk_norm"]:
        kind, config = "Qwen3ForCausalLM", _config(path, Qwen3Config, {**stock, **every_layer})
    elif given["qkv_bias"]:
        kind, config = "Qwen2ForCausalLM", _config(path, Qwen2Config, {**stock, **every_layer})
    elif window is not None:
        kind, config = "MistralForCausalLM", _config(path, MistralConfig, {**stock, "sliding_window": window})
    else:
        kind, config = "LlamaForCausalLM", _config(path, LlamaConfig, stock)
    preset = "attnres" if size == 1 else "attnres-block"
    fields = {} if size == 1 else {"depth_block_size": -(-size // 2)}
    return Hosted(config, ARCHITECTURES[kind], preset, fields, size)


ORIGINS: dict[str, Origin] = {
    "qwen3_attnres": Origin("qwen3_attnres", _reads("final_res"), _read_qwen3_attnres),
    "transformer": Origin(
        "flash-linear-attention's transformer",
        (
            Rename("model.embeddings.weight", "model.embed_tokens.weight"),
            Rename("model.layers.{layer}.attn_norm.weight", "model.layers.{layer}.input_layernorm.weight"),
            Rename("model.layers.{layer}.mlp_norm.weight", "model.layers.{layer}.post_attention_layernorm.weight"),
            Rename("model.layers.{layer}.attn.{rest}", "model.layers.{layer}.self_attn.{rest}"),
            *_reads("res"),
        ),
        _read_fla,
    ),
}
"""By the model type in `config.json`."""


# -- the source -------------------------------------------------------------------------------------------------------


class ImportedSource(RoutedSource):
    """A foreign folder: its backbone's tensors and those of its routing, queries as [D].

    Attributes:
        hosted: what its configuration says.
        theirs: our key → the stored one.
    """

    carries_routing = True

    def __init__(self, folder: FolderSource, routing: DepthRouteConfig, hosted: Hosted, theirs: Mapping[str, str]):
        super().__init__(folder, routing)
        self.hosted, self.theirs = hosted, theirs

    def shapes(self) -> dict[str, tuple[int, ...]]:
        found = {key: self.folder.stored[theirs].shape for key, theirs in self.theirs.items()}
        width = (self.config.hidden_size,)
        queries = {key: width for key, shape in found.items() if key.endswith("_read.query") and shape == (1, *width)}
        return {**found, **queries}

    def dtypes(self) -> dict[str, torch.dtype]:
        return {key: self.folder.stored[theirs].dtype for key, theirs in self.theirs.items()}

    def read(self, key: str) -> Tensor:
        return self.folder.read(self.theirs[key]).reshape(self.shapes()[key])

    def is_verbatim(self, key: str) -> bool:
        return False  # other names, and not all of them

    def load_stock(self, dtype: torch.dtype) -> PreTrainedModel:
        backbone = {key: tensor.to(dtype) for key, tensor in self.tensors() if "_read." not in key}
        stock = self.architecture.stock.from_pretrained(
            None, config=self.config, state_dict=backbone, dtype=dtype, attn_implementation="sdpa"
        )
        return self.computing(stock.eval(), lambda key: self.read(key).to(dtype))

    def computing(self, stock: PreTrainedModel, read: Callable[[str], Tensor]) -> AttnResReference:
        routing = {key: read(key) for key in self.theirs if "_read." in key}
        return AttnResReference(stock, routing, self.hosted.unit, self.hosted.adds)

    def allowed_gap(self, config: DepthRouteConfig) -> float:
        return EXPORT_GAP if config.depth_anchored else ROUNDING_GAP


def open_imported(
    folder: Path, entries: dict[str, Any], label: str, hub_id: str | None, ignore_code: bool
) -> ImportedSource:
    """A folder of one of `ORIGINS`; with code of its own where `ignore_code`, which is not run.

    Raises:
        Refused: its configuration says what we cannot host exactly, or its keys are not those of its origin: then the keys that
            gave it away are named.
    """
    path = folder / "config.json"
    origin = ORIGINS[entries["model_type"]]
    if entries.get("quantization_config") is not None:
        raise Refused(f"{path}: quantization_config: got one, allowed: unquantized weights")
    if not ignore_code:
        check_code(path, entries, f"{origin.name} as it is public")
    hosted = origin.read_config(path, entries)
    try:
        routing = DepthRouteConfig.from_preset(hosted.preset, base=hosted.config, **hosted.fields)
    except (ValueError, TypeError) as error:
        raise Refused(f"{path}: {one_line(error)}") from error
    stored = read_headers(folder)
    rules = KeyRules(origin.renames)
    theirs = {rules.to_ours(key): key for key in stored}
    _check_keys(folder, origin, hosted, routing, rules, theirs, stored)
    live = {f"model.{read_name(routing, s)}" for s in live_reads(routing)}
    kept = {key: name for key, name in theirs.items() if "_read." not in key or key.rpartition(".")[0] in live}
    left_out = [name for key, name in theirs.items() if key not in kept]
    decisions = (f"without effect, left out: {listed(left_out)}",) if left_out else ()
    found = FolderSource(folder, label, hosted.config, hosted.architecture, stored, hub_id, decisions)
    return ImportedSource(found, routing, hosted, kept)


def _check_keys(
    folder: Path,
    origin: Origin,
    hosted: Hosted,
    routing: DepthRouteConfig,
    rules: KeyRules,
    theirs: Mapping[str, str],
    stored: Mapping[str, StoredTensor],
) -> None:
    with torch.device("meta"):
        backbone = set(hosted.architecture.stock(hosted.config).state_dict())
    reads = [f"model.{read_name(routing, s)}" for s in range(read_count(routing))]
    parameters = {f"{read}.{name}" for read in reads for name in ("query", "key_norm")}
    expected = backbone | parameters
    tied = {"lm_head.weight"} if hosted.config.tie_word_embeddings else set()
    foreign = sorted(name for key, name in theirs.items() if key not in expected)
    foreign += sorted(set(stored) - set(theirs.values()))
    absent = sorted(rules.to_source(key) for key in expected - set(theirs) - tied)
    problems = [f"{len(foreign)} keys that it does not have: {listed(foreign)}"] if foreign else []
    problems += [f"{len(absent)} of its keys are missing: {listed(absent)}"] if absent else []
    if problems:
        raise Refused(
            f"{folder}: an unknown origin, not that of {origin.name}: {'; '.join(problems)}; allowed: exactly its keys"
        )


def _config(path: Path, kind: type[PreTrainedConfig], entries: dict[str, Any]) -> PreTrainedConfig:
    left = {key: value for key, value in entries.items() if key not in ("model_type", "architectures", "auto_map")}
    try:
        return kind(**left)
    except (ValueError, KeyError, TypeError, StrictDataclassError) as error:
        raise Refused(f"{path}: {one_line(error)}") from error


def foreign_entries(folder: Path) -> dict[str, Any] | None:
    """The entries of a folder's `config.json` where its model type is one of `ORIGINS`; None otherwise, also where it cannot
    be read."""
    try:
        entries = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    foreign = (
        isinstance(entries, dict) and isinstance(entries.get("model_type"), str) and entries["model_type"] in ORIGINS
    )
    return entries if foreign else None
