# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Configuration of the DepthRoute family: Qwen3's fields, and how its residuals are routed through depth."""

# isort: off
# first, and named twice because it is imported for its check alone: an old release must fail with one line
from .compat import check_transformers_version as check_transformers_version

# isort: on
import difflib
import json
import math
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig

from .depth_schedule import live_reads


AUTO_MAP = {
    "AutoConfig": "configuration_depthroute.DepthRouteConfig",
    "AutoModel": "modeling_depthroute.DepthRouteModel",
    "AutoModelForCausalLM": "modeling_depthroute.DepthRouteForCausalLM",
    "AutoModelForSequenceClassification": "modeling_depthroute.DepthRouteForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_depthroute.DepthRouteForTokenClassification",
    "AutoModelForQuestionAnswering": "modeling_depthroute.DepthRouteForQuestionAnswering",
}
"""Every class that a checkpoint folder can be loaded as with `trust_remote_code=True`."""

FAMILY_PREFIXES = ("residual_", "depth_", "dual_", "hyper_", "qk_")
"""Names under these prefixes are ours: one that is no field is a mistake, not somebody's extra entry."""

HOSTED_MODEL_TYPES = ("qwen3", "qwen3_moe", "llama", "mistral", "qwen2")
"""Backbones that a configuration can start from."""

_DEPTH = ("depth_attention",)
_DUAL = ("dual_stream",)
MEANT_FOR: dict[str, tuple[str, ...]] = {
    "depth_source": _DEPTH,
    "depth_combine": _DEPTH,
    "depth_block_size": _DEPTH + _DUAL,
    "depth_num_heads": _DEPTH + _DUAL,
    "depth_key_norm": _DEPTH + _DUAL,
    "depth_logit_scale": _DEPTH + _DUAL,
    "depth_value_route": _DEPTH,
    "depth_detail_bases": _DEPTH,
    "depth_detail_bias": _DEPTH,
    "depth_detail_max_scale": _DEPTH,
    "depth_value_projection": _DEPTH,
    "depth_null_source": _DEPTH,
    "dual_routing": _DUAL,
    "dual_gates": _DUAL,
    "dual_partial_source": _DUAL,
    "dual_transport_init": _DUAL,
    "dual_write_asymmetry": _DUAL,
    "hyper_num_streams": ("hyper_connection",),
}
"""Field → the residual types that read it. `depth_anchored` and `depth_backend` are taken by all."""

NAMING = ("residual_type", "depth_source", "depth_combine", "depth_value_route", "depth_detail_bases", "dual_routing")
"""The fields that tell presets apart, besides blocks."""

HOSTING_FIELDS = ("qk_norm", "attention_output_bias")
"""The family's fields that say what a backbone is, and not how it is routed."""

# A backbone's entries that say where it came from, or that its own class derives again.
_NOT_INHERITED = (
    "model_type", "architectures", "auto_map", "transformers_version", "_name_or_path", "pretraining_tp", "converted_from",
)  # fmt: skip


def nearest_names(name: str, allowed: Iterable[str]) -> str:
    """The allowed names closest to `name`, for an error message; where none is close all of them, unless they are many."""
    names = sorted(allowed)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5) or (names if len(names) <= 20 else [])
    return ", ".join(close) or "none is near"


@dataclass(frozen=True)
class Preset:
    """One published way of routing: a name for a set of field values.

    Attributes:
        fields: values of `DepthRouteConfig`'s routing fields.
        blocks: whether layers are grouped: "always" (a block size is filled in), "optional", "never", or "fixed" (to the
            size among the fields).
        equation: what a branch reads.
        paper: where it comes from.
    """

    fields: dict[str, Any]
    blocks: Literal["always", "optional", "never", "fixed"]
    equation: str
    paper: str


_ATTNRES = "AttnRes, arXiv 2603.15031"
_DELTA = "Delta AttnRes, arXiv 2605.18855"

_RD = "RD-AttnRes, arXiv 2608.01075"
_WAV = "WAV v1, arXiv 2606.06564v1"
_DAR = "DAR, arXiv 2607.18730"
_REPLACE = {"residual_type": "depth_attention", "depth_source": "output", "depth_combine": "replace"}
_ADD = {"residual_type": "depth_attention", "depth_source": "output", "depth_combine": "add"}
_DUAL_FIELDS = {"residual_type": "dual_stream", "dual_routing": "cross_key"}

PRESETS: dict[str, Preset] = {
    "standard": Preset({"residual_type": "standard"}, "never", "x = h", "residual, arXiv 1512.03385"),
    "attnres": Preset(_REPLACE, "never", "x = Σ p_i v_i over e, u_0 … u_{s-1}", _ATTNRES),
    "attnres-block": Preset(_REPLACE, "always", "x = Σ p_i v_i over e, C_0 … C_{b-1}, PC", _ATTNRES),
    "attnres-states": Preset(
        {**_REPLACE, "depth_source": "state"}, "optional", "x = Σ p_i h_i over h_0 … h_s", f"baseline of {_DELTA}"
    ),
    "delta": Preset(_ADD, "never", "x = h + Σ p_i v_i over e, u_0 … u_{s-1}", _DELTA),
    "delta-block": Preset(_ADD, "always", "x = h + Σ p_i v_i over e, C_0 … C_{b-1}", _DELTA),
    "rd-attnres": Preset(
        {**_REPLACE, "depth_value_route": "decoupled"}, "always", "x^QK, x^V = attnres-block with q, with q^V", _RD
    ),
    "wav": Preset(
        {**_REPLACE, "depth_detail_bases": ["phase", "split"]},
        "always",
        "attnres-block, and D̃^phase, D̃^split per block",
        _WAV,
    ),
    "dar": Preset(_DUAL_FIELDS, "always", "x = α x^0 + (1 − α) x^1, keys of x^j from the other stream", _DAR),
    "dar-full": Preset({**_DUAL_FIELDS, "depth_block_size": 1}, "fixed", "dar with blocks of one layer", _DAR),
    "mhc": Preset(
        {"residual_type": "hyper_connection"}, "never", "x = H^pre X, X ← H^res X + H^post u", "mHC, arXiv 2512.24880"
    ),
    "rezero": Preset({"residual_type": "rezero"}, "never", "h ← h + a u, scalar a", "ReZero, arXiv 2003.04887"),
    "layerscale": Preset(
        {"residual_type": "layerscale"}, "never", "h ← h + a ⊙ u, a [D]", "LayerScale, arXiv 2103.17239"
    ),
}


def get_preset(name: str) -> Preset:
    """The preset called `name`.

    Raises:
        ValueError: unknown name; the nearest ones are listed.
    """
    if name not in PRESETS:
        raise ValueError(f"preset: got {name!r}, nearest: {nearest_names(name, PRESETS)}")
    return PRESETS[name]


def read_backbone_config(folder: str | Path) -> PreTrainedConfig:
    """The configuration in a local folder (or of a hub id), of a backbone that can be hosted. Never runs code from it.

    Raises:
        ValueError: `config.json` is missing or unreadable, or its model type is not hosted.
    """
    path = Path(folder)
    if path.is_dir():
        try:
            entries = json.loads((path / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{path / 'config.json'}: {type(error).__name__}, allowed: a readable model configuration"
            ) from error
        model_type = entries.get("model_type") if isinstance(entries, dict) else None
        if model_type not in (*HOSTED_MODEL_TYPES, "depthroute"):
            raise ValueError(
                f"{path / 'config.json'}: model_type: got {model_type!r}, allowed: {', '.join(HOSTED_MODEL_TYPES)}, depthroute"
            )
    return AutoConfig.from_pretrained(folder, trust_remote_code=False)


@strict
class DepthRouteConfig(Qwen3Config):
    r"""Configuration of a DepthRoute model. `DepthRouteConfig()` is Delta AttnRes (`delta`), plain.

    All of Qwen3's fields keep their meaning. Those of this family:

    Args:
        residual_type: "depth_attention" (learned reads over depth) or "standard" (equals Qwen3 bit for bit).
        depth_source: what a source is: an "output" u_s (or a block's sum of them) or a "state" h_s.
        depth_combine: "replace" the stream by the mix (AttnRes) or "add" the mix to it (Delta).
        depth_block_size: layers per block, ≥ 1, or None: every sublayer is a source.
        depth_anchored: subtract the weights at the start, so that a zero query reads the stream exactly. The default of a
            conversion (True) differs from that of training from scratch (False, the papers' form).
        depth_num_heads: depth heads H; divides `hidden_size`. Each routes its own slice, with no extra parameters.
        depth_key_norm: "learned" γ on the normalised keys, or "none".
        depth_logit_scale: factor on every routing logit, > 0.
        depth_value_route: what attention's values read: "shared" (as queries and keys), "decoupled" (a query of their own,
            RD-AttnRes), or its controls "average" (half the sum of both routes feeds all three) and "uniform" (Frozen-V).
        depth_detail_bases: WAV's details of a block: of "phase" (attention − MLP) and "split" (first half − second half).
        depth_detail_bias: initial logit bias of details (b⁰, rounded to the bias parameter's dtype).
        depth_detail_max_scale: cap of the RMS matching of details, > 0.
        depth_value_projection: a learned projection of the values, the identity at the start (DAR's SepV control).
        depth_null_source: one more, learned source, zero at the start (the released Delta code's form).
        dual_routing: DAR: whose entries are keys and whose are values ("cross_key" is DAR).
        dual_gates: "static" scalars per sublayer, or "dynamic": plus a projection of what was read.
        dual_partial_source: whether the running block is a source.
        dual_transport_init: r, ρ = σ(r).
        dual_write_asymmetry: in (0, 1): write gates start at 1 ± this.
        hyper_num_streams: mHC's n ≥ 2.
        depth_backend: what computes depth reads: "reference"; "cpu" or "triton" of the package `depthroute_kernels`, which
            refuse where they cannot run; or "auto", the fastest of them that can. Under torch.compile "cpu" is the reference,
            which the compiler fuses.
        qk_norm: False hosts backbones without query and key norms (Llama, Mistral, Qwen2).
        attention_output_bias: False hosts Qwen2, whose `attention_bias` is on queries, keys and values alone.
        num_experts: experts of a sparse layer; 0 is dense. It and the seven fields behind it are Qwen3-MoE's own;
            `router_aux_loss_coef` is 0.001 unless given, and 0 for a dense model.

    Raises:
        ValueError: an unknown name under this family's prefixes, with the nearest ones.
        huggingface_hub.errors.StrictDataclassError: a value out of range, or a model in which no read would have two
            sources; `from_preset` raises these as one-line ValueErrors.
    """

    model_type = "depthroute"
    base_model_pp_plan = None  # sources cannot cross a pipeline stage: only hidden states travel there
    base_model_ep_plan = Qwen3MoeConfig.base_model_ep_plan

    residual_type: Literal["standard", "depth_attention", "dual_stream", "hyper_connection", "rezero", "layerscale"] = (
        "depth_attention"
    )
    depth_source: Literal["output", "state"] = "output"
    depth_combine: Literal["replace", "add"] = "add"
    depth_block_size: int | None = None
    depth_anchored: bool = False
    depth_num_heads: int = 1
    depth_key_norm: Literal["learned", "none"] = "learned"
    depth_logit_scale: float | int = 1.0
    depth_value_route: Literal["shared", "decoupled", "average", "uniform"] = "shared"
    depth_detail_bases: list[Literal["phase", "split"]] = field(default_factory=list)
    depth_detail_bias: float | int = -2.0
    depth_detail_max_scale: float | int = 1.0
    depth_value_projection: bool = False
    depth_null_source: bool = False
    depth_backend: Literal["auto", "reference", "cpu", "triton"] = "auto"
    dual_routing: Literal["cross_key", "self", "cross_value", "fixed"] = "cross_key"
    dual_gates: Literal["static", "dynamic"] = "static"
    dual_partial_source: bool = True
    dual_transport_init: float | int = 3.0
    dual_write_asymmetry: float | int = 0.5
    hyper_num_streams: int = 4
    qk_norm: bool = True
    attention_output_bias: bool = True

    num_experts: int = 0
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 768
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] = field(default_factory=list)
    norm_topk_prob: bool = False
    output_router_logits: bool = False
    router_aux_loss_coef: float | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        own = family_fields()
        for name in kwargs:
            if name.startswith(FAMILY_PREFIXES):
                raise ValueError(f"{name}: unknown field, nearest: {nearest_names(name, own)}")
        # how tensor parallelism divides the branches, as upstream does: reads stay whole on every process, as what they mix is.
        # Set, for older releases change it here where embeddings are tied.
        # CODEPATH: Qwen3-MoE checkpoints have experts to divide, all others have none, and rules that match nothing are warned of
        upstream: Any = Qwen3MoeConfig if self.num_experts else Qwen3Config
        self.base_model_tp_plan = dict(upstream.base_model_tp_plan)
        super().__post_init__(**kwargs)
        if self.router_aux_loss_coef is None:
            # not Qwen3-MoE's 0.001 for a dense model: libraries take a coefficient for the mark of an expert router
            self.router_aux_loss_coef = 0.001 if self.num_experts else 0.0
        self.auto_map = dict(AUTO_MAP)

    def is_sparse(self, layer_idx: int) -> bool:
        """Whether that layer's MLP is a mixture of experts, by Qwen3-MoE's rule."""
        return (
            self.num_experts > 0
            and layer_idx not in self.mlp_only_layers
            and (layer_idx + 1) % self.decoder_sparse_step == 0
        )

    def validate_experts(self) -> None:
        if self.num_experts < 0:
            raise ValueError(f"num_experts: got {self.num_experts}, allowed: ≥ 0 (0 is dense)")
        if self.num_experts and not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(
                f"num_experts_per_tok: got {self.num_experts_per_tok}, allowed: 1 to num_experts = {self.num_experts}"
            )
        if self.decoder_sparse_step < 1:
            raise ValueError(f"decoder_sparse_step: got {self.decoder_sparse_step}, allowed: ≥ 1")

    def validate_depth_block_size(self) -> None:
        if self.depth_block_size is not None and self.depth_block_size < 1:
            raise ValueError(f"depth_block_size: got {self.depth_block_size}, allowed: layers ≥ 1, or None")

    def validate_depth_num_heads(self) -> None:
        if self.depth_num_heads < 1 or self.hidden_size % self.depth_num_heads:
            raise ValueError(
                f"depth_num_heads: got {self.depth_num_heads}, allowed: a divisor of hidden_size = {self.hidden_size}"
            )

    def validate_positive_numbers(self) -> None:
        for name in ("depth_logit_scale", "depth_detail_max_scale"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name}: got {getattr(self, name)}, allowed: a finite number > 0")
        for name in ("depth_detail_bias", "dual_transport_init"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name}: got {getattr(self, name)}, allowed: a finite number")

    def validate_depth_details(self) -> None:
        bases = self.depth_detail_bases
        if self.residual_type != "depth_attention":  # where details have no meaning at all
            return
        if not bases:
            for name in ("depth_detail_bias", "depth_detail_max_scale"):
                default = family_fields()[name]
                if getattr(self, name) != default:
                    raise ValueError(
                        f"{name}: got {getattr(self, name)}, allowed: {default}, it has no meaning without depth_detail_bases"
                    )
            return
        if len(set(bases)) != len(bases):
            raise ValueError(f"depth_detail_bases: got {bases}, allowed: each basis once")
        if self.depth_source != "output":
            raise ValueError(
                f"depth_source: got {self.depth_source!r} with details, allowed: 'output', states have no updates"
            )
        if self.depth_block_size is None:
            raise ValueError(f"depth_block_size: got None with depth_detail_bases = {bases}, allowed: layers ≥ 1")
        if self.depth_block_size == 1 and len(bases) == 2:
            raise ValueError(
                "depth_detail_bases: got ['phase', 'split'] with depth_block_size = 1, where they are the same; allowed: one"
            )

    def validate_dual_streams(self) -> None:
        if not 0 < self.dual_write_asymmetry < 1:
            raise ValueError(
                f"dual_write_asymmetry: got {self.dual_write_asymmetry}, allowed: between 0 and 1 (at 0 both streams start "
                "identical and only rounding would separate them)"
            )
        if self.residual_type == "dual_stream" and self.depth_block_size is None:
            raise ValueError("depth_block_size: got None for two streams, allowed: layers ≥ 1 (1 is the full form)")

    def validate_hyper_num_streams(self) -> None:
        if self.hyper_num_streams < 2:
            raise ValueError(f"hyper_num_streams: got {self.hyper_num_streams}, allowed: ≥ 2")

    def validate_fields_have_a_meaning(self) -> None:
        """A field moved from its default where the residual does not read it is a mistake, and named."""
        defaults = family_fields()
        for name, default in defaults.items():
            if name not in MEANT_FOR or getattr(self, name) == default:
                continue
            if self.residual_type not in MEANT_FOR[name]:
                raise ValueError(
                    f"{name}: got {getattr(self, name)!r}, allowed: {default!r}, it has no meaning for residual_type = "
                    f"{self.residual_type!r}"
                )

    def validate_reads(self) -> None:
        # a block size below 1 is named by its own validator
        routed = self.residual_type in ("depth_attention", "dual_stream") and (self.depth_block_size or 1) >= 1
        if routed and not live_reads(self):
            raise ValueError(
                f"depth_block_size: got {self.depth_block_size} with num_hidden_layers = {self.num_hidden_layers}, "
                "which leaves no read with two sources; allowed: a block smaller than the model"
            )

    @property
    def preset_name(self) -> str:
        """The preset that these fields spell, for display; "custom" where none does. Only `NAMING` fields and the
        presence of blocks make a name; heads, anchoring, norms, gates and scales are options on top."""

        def spelled(preset: Preset) -> dict[str, Any]:
            return {
                name: preset.fields.get(name, default) for name, default in family_fields().items() if name in NAMING
            }

        own = {name: getattr(self, name) for name in NAMING}
        for name, preset in sorted(PRESETS.items(), key=lambda item: item[1].blocks != "fixed"):
            in_blocks = {"always": True, "never": False}.get(preset.blocks)
            fits = in_blocks is None or in_blocks == (self.depth_block_size is not None)
            fixed = preset.blocks != "fixed" or self.depth_block_size == preset.fields["depth_block_size"]
            if fits and fixed and own == spelled(preset):
                return name
        return "custom"

    @classmethod
    def from_preset(
        cls, name: str, base: PreTrainedConfig | str | Path | None = None, **values: Any
    ) -> "DepthRouteConfig":
        """A configuration by preset name, on the sizes of a backbone.

        Args:
            name: one of `PRESETS`.
            base: the configuration of a hosted backbone (`HOSTED_MODEL_TYPES`), or a folder (or hub id) that holds one; default: Qwen3's own defaults.
            values: any field, over the preset's and the backbone's.

        Raises:
            ValueError: unknown preset or field (with the nearest names), a block size for a preset without blocks, a
                backbone that cannot be hosted.
        """
        preset = get_preset(name)
        for key in values:
            if key not in known_fields():
                raise ValueError(f"{key}: unknown field, nearest: {nearest_names(key, known_fields())}")
        if preset.blocks in ("never", "fixed") and values.get("depth_block_size") is not None:
            raise ValueError(
                f"depth_block_size: got {values['depth_block_size']}, allowed: none, preset {name!r} has {'blocks of one layer' if preset.blocks == 'fixed' else 'no blocks'}"
            )
        backbone = read_backbone_config(base) if isinstance(base, (str, Path)) else base
        inherited = {} if backbone is None else backbone_fields(backbone)
        if "num_hidden_layers" in values:
            inherited.pop("layer_types", None)  # one entry per layer of the backbone: derived anew
        settings = {**inherited, **deepcopy(preset.fields), **values}
        if preset.blocks == "always" and settings.get("depth_block_size") is None:
            layers = settings.get("num_hidden_layers", cls.num_hidden_layers)
            # with both details, blocks of one layer have the same detail twice
            smallest = 2 if len(settings.get("depth_detail_bases") or []) == 2 else 1
            settings["depth_block_size"] = max(smallest, -(-layers // 8))
        try:
            return cls(**settings)
        except StrictDataclassError as error:
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            raise ValueError(str(cause)) from error


def family_fields() -> dict[str, Any]:
    """The fields that this family adds to Qwen3's and Qwen3-MoE's, with their defaults."""
    inherited = {item.name for backbone in (Qwen3Config, Qwen3MoeConfig) for item in fields(backbone)}
    own = [item for item in fields(DepthRouteConfig) if item.name not in inherited]
    return {item.name: item.default_factory() if callable(item.default_factory) else item.default for item in own}


def known_fields() -> list[str]:
    """Every field of the configuration, Qwen3's included."""
    return [item.name for item in fields(DepthRouteConfig)]


def backbone_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """A hosted backbone's configuration as `DepthRouteConfig` arguments.

    Raises:
        ValueError: a model type that is not hosted, or a setting of it that the Qwen3 backbone has no place for.
    """
    if config.model_type not in (*HOSTED_MODEL_TYPES, "depthroute"):
        raise ValueError(f"model_type: got {config.model_type!r}, allowed: {', '.join(HOSTED_MODEL_TYPES)}")
    values = {key: value for key, value in config.to_dict().items() if key not in _NOT_INHERITED}
    for shown, stored in config.attribute_map.items():  # upstream stores num_experts under another name
        if stored in values and shown in known_fields():
            values[shown] = values.pop(stored)
    rotated = (values.get("rope_parameters") or {}).get("partial_rotary_factor")
    if rotated not in (None, 1):
        raise ValueError(f"partial_rotary_factor: got {rotated}, allowed: 1, Qwen3's attention rotates whole heads")
    if config.model_type == "depthroute":
        return {key: value for key, value in values.items() if key not in family_fields() or key in HOSTING_FIELDS}
    if values.pop("mlp_bias", False) and config.model_type == "llama":
        raise ValueError("mlp_bias: got True, allowed: False, the Qwen3 MLP has no biases")
    values.update(dict.fromkeys(HOSTING_FIELDS, True))
    if config.model_type in ("llama", "mistral", "qwen2"):
        values["qk_norm"] = False
    if config.model_type in ("qwen3_moe", "mistral"):  # their window, where they have one, is every layer's
        values.update(layer_types=None, max_window_layers=0)
    if config.model_type == "llama":  # entries that its own class does not read
        values.update(layer_types=None, use_sliding_window=False)
    elif config.model_type == "mistral":
        values.update(attention_bias=False, use_sliding_window=config.sliding_window is not None)
    elif config.model_type == "qwen2":
        head_dim = values.get("head_dim") or config.hidden_size // config.num_attention_heads
        values.update(attention_bias=True, attention_output_bias=False, head_dim=head_dim)
    return values


DepthRouteConfig.register_for_auto_class("AutoConfig")

__all__ = ["DepthRouteConfig"]
