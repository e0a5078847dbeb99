# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Other people's AttnRes checkpoints: logits against their equations written out by hand, and what is refused."""

import json
import math

import pytest
import torch
from conversion_helpers import edit_json, edit_weights, tiny_tokenizer
from safetensors.torch import load_file, save_file

from depthroute import DepthRouteConfig, DepthRouteForCausalLM, convert, revert, verify
from depthroute.errors import CheckFailed, Refused
from depthroute_conversion.imported import ImportedSource
from depthroute_conversion.imported_reference import AttnResReference


D, HEADS, KV, HIDDEN, VOCAB = 32, 4, 2, 48, 61


# -- checkpoints as their authors write them --------------------------------------------------------------------------


def backbone(layers: int, names: dict[str, str], qk_norm: bool, bias: bool = False) -> dict[str, torch.Tensor]:
    """Random tensors of a decoder under the given names."""
    size = D // HEADS

    def matrix(rows: int, columns: int = D) -> torch.Tensor:
        return torch.randn(rows, columns, dtype=torch.float64) * 0.2

    tensors = {names["embedding"]: torch.randn(VOCAB, D).double(), "lm_head.weight": matrix(VOCAB)}
    tensors["model.norm.weight"] = 1 + 0.1 * torch.randn(D).double()
    for layer in range(layers):
        at = f"model.layers.{layer}"
        rows = {"q_proj": D, "k_proj": KV * size, "v_proj": KV * size, "o_proj": D}
        for name, count in rows.items():
            tensors[f"{at}.{names['attention']}.{name}.weight"] = matrix(count)
            if bias and name != "o_proj":
                tensors[f"{at}.{names['attention']}.{name}.bias"] = torch.randn(count).double()
        if qk_norm:
            for name in ("q_norm", "k_norm"):
                tensors[f"{at}.{names['attention']}.{name}.weight"] = 1 + 0.3 * torch.randn(size).double()
        tensors |= {f"{at}.mlp.{name}.weight": matrix(HIDDEN) for name in ("gate_proj", "up_proj")}
        tensors[f"{at}.mlp.down_proj.weight"] = matrix(D, HIDDEN)
        for name in ("first norm", "second norm"):
            tensors[f"{at}.{names[name]}.weight"] = 1 + 0.3 * torch.randn(D).double()
    return tensors


def reads(layers: int, final: str | None) -> dict[str, torch.Tensor]:
    """Routing far from its start."""
    modules = [f"model.layers.{layer}.{part}_res" for layer in range(layers) for part in ("attn", "mlp")]
    tensors = {}
    for name in [*modules, *([f"model.{final}"] if final else [])]:
        tensors[f"{name}_proj.weight"] = 0.5 * torch.randn(1, D).double()
        tensors[f"{name}_norm.weight"] = 1 + 0.3 * torch.randn(D).double()
    return tensors


def save(folder, tensors: dict[str, torch.Tensor], config: dict, dtype=torch.float32):
    folder.mkdir()
    save_file({key: value.to(dtype) for key, value in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


QWEN = {
    "embedding": "model.embed_tokens.weight", "attention": "self_attn", "first norm": "input_layernorm",
    "second norm": "post_attention_layernorm",
}  # fmt: skip
FLA = {
    "embedding": "model.embeddings.weight", "attention": "attn", "first norm": "attn_norm", "second norm": "mlp_norm",
}  # fmt: skip


def qwen3_attnres(folder, layers: int = 5, mode: str = "block", blocks: int = 2, dtype=torch.float32, **config):
    torch.manual_seed(1)
    entries = {
        "architectures": ["Qwen3AttnResForCausalLM"], "model_type": "qwen3_attnres", "attnres_mode": mode,
        "attnres_num_blocks": blocks, "attnres_gate_type": "bias", "vocab_size": VOCAB, "hidden_size": D,
        "intermediate_size": HIDDEN, "num_hidden_layers": layers, "num_attention_heads": HEADS, "num_key_value_heads": KV,
        "head_dim": D // HEADS, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "hidden_act": "silu", "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, "dtype": "float32",
    }  # fmt: skip
    tensors = backbone(layers, QWEN, qk_norm=True) | reads(layers, None if mode == "delta" else "final_res")
    return save(folder, tensors, {**entries, **config}, dtype)


def fla(folder, layers: int = 3, size: int = 2, qk_norm: bool = False, qkv_bias: bool = False, **config):
    torch.manual_seed(2)
    entries = {
        "architectures": ["TransformerForCausalLM"], "model_type": "transformer", "attnres_block_size": size,
        "vocab_size": VOCAB, "hidden_size": D, "intermediate_size": HIDDEN, "num_hidden_layers": layers, "num_heads": HEADS,
        "num_kv_heads": KV, "max_position_embeddings": 64, "norm_eps": 1e-5, "rope_theta": 5000.0, "hidden_act": "swish",
        "qk_norm": qk_norm, "qkv_bias": qkv_bias, "window_size": None, "hidden_ratio": 4, "fuse_norm": True,
    }  # fmt: skip
    return save(folder, backbone(layers, FLA, qk_norm, qkv_bias) | reads(layers, "res"), {**entries, **config})


# -- the equations, by hand, in float64 -------------------------------------------------------------------------------


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Positions on [heads, T, size], theta 5000."""
    length, size = x.shape[-2:]
    angle = torch.arange(length).double()[:, None] * 5000.0 ** (-torch.arange(0, size, 2).double() / size)
    low, high = x.chunk(2, -1)
    return torch.cat([low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()], -1)


def attention(w: dict, at: str, x: torch.Tensor, window: int | None) -> torch.Tensor:
    length, size = x.shape[0], D // HEADS

    def project(name: str, heads: int) -> torch.Tensor:
        y = x @ w[f"{at}.{name}_proj.weight"].T + w.get(f"{at}.{name}_proj.bias", 0)
        y = y.view(length, heads, size).transpose(0, 1)
        return rms(y, w[f"{at}.{name}_norm.weight"]) if f"{at}.{name}_norm.weight" in w else y

    q, k, v = rotate(project("q", HEADS)), rotate(project("k", KV)), project("v", KV)
    k, v = (each.repeat_interleave(HEADS // KV, 0) for each in (k, v))
    ago = torch.arange(length)[:, None] - torch.arange(length)
    seen = (ago >= 0) & (ago < (window or length))
    p = (q @ k.mT / math.sqrt(size)).masked_fill(~seen, -math.inf).softmax(-1)
    return (p @ v).transpose(0, 1).reshape(length, D) @ w[f"{at}.o_proj.weight"].T


def by_hand(
    folder, names: dict, final: str, per_block: int, ids: torch.Tensor, mode="replace", window=None
) -> torch.Tensor:
    """Logits [T, V] of one sequence. Sources are counted from their definition: read s of 2L has the embedding, the sum of the
    updates of every block of `per_block` sublayers that is over, and that of the running one."""
    w = {key: value.double() for key, value in load_file(folder / "model.safetensors").items()}
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    e, updates = w[names["embedding"]][ids], []

    def read(s: int, module: str) -> torch.Tensor:
        blocks = [updates[start : start + per_block] for start in range(0, len(updates), per_block)]
        sources = torch.stack([e, *(sum(block) for block in blocks)])
        stream = e + sum(updates) if updates else e
        if len(sources) == 1:
            return stream
        logits = (rms(sources, w[f"{module}_norm.weight"]) * w[f"{module}_proj.weight"][0]).sum(-1)
        mixed = (logits.softmax(0)[..., None] * sources).sum(0)
        return mixed if mode == "replace" else stream + mixed

    for s in range(2 * layers):
        at, part = f"model.layers.{s // 2}", ("attn", "mlp")[s % 2]
        x = read(s, f"{at}.{part}_res")
        if part == "attn":
            updates.append(
                attention(w, f"{at}.{names['attention']}", rms(x, w[f"{at}.{names['first norm']}.weight"]), window)
            )
        else:
            x = rms(x, w[f"{at}.{names['second norm']}.weight"])
            gate = x @ w[f"{at}.mlp.gate_proj.weight"].T
            up = x @ w[f"{at}.mlp.up_proj.weight"].T
            updates.append((gate * gate.sigmoid() * up) @ w[f"{at}.mlp.down_proj.weight"].T)
    x = read(2 * layers, f"model.{final}") if mode == "replace" else e + sum(updates)
    return rms(x, w["model.norm.weight"]) @ w.get("lm_head.weight", w[names["embedding"]]).T


IDS = torch.arange(23) * 7 % VOCAB

CASES = {
    "qwen3_attnres, blocks of 3 and 2 layers": (qwen3_attnres, {"blocks": 2}, 6, 3),
    "qwen3_attnres, blocks of 2, 2 and 1": (qwen3_attnres, {"blocks": 3}, 4, 2),
    "qwen3_attnres, blocks of 2 though 4 were asked for": (qwen3_attnres, {"blocks": 4}, 4, 2),
    "qwen3_attnres, one block": (qwen3_attnres, {"layers": 3, "blocks": 1}, 6, 3),
    "qwen3_attnres, more blocks than layers": (qwen3_attnres, {"layers": 3, "blocks": 8}, 2, 1),
    "qwen3_attnres, full": (qwen3_attnres, {"mode": "full"}, 1, None),
    "qwen3_attnres, delta": (qwen3_attnres, {"mode": "delta", "layers": 4}, 1, None),
    "qwen3_attnres in bfloat16": (qwen3_attnres, {"blocks": 3, "dtype": torch.bfloat16}, 4, 2),
    "fla, blocks of a layer": (fla, {"size": 2}, 2, 1),
    "fla, blocks of 2 and 1 layers": (fla, {"size": 4}, 4, 2),
    "fla, every sublayer": (fla, {"size": 1}, 1, None),
    "fla, a block larger than the model": (fla, {"size": 10}, 10, 5),
    "fla, an odd block larger than the model": (fla, {"size": 7}, 7, 4),
    "fla with query and key norms": (fla, {"qk_norm": True, "size": 4}, 4, 2),
    "fla with biases": (fla, {"qkv_bias": True}, 2, 1),
    "fla with a window": (fla, {"window_size": 5}, 2, 1),
    "fla with biases and a window": (fla, {"window_size": 5, "qkv_bias": True}, 2, 1),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_equations(case, tmp_path):
    make, options, per_block, layers_per_block = CASES[case]
    source = make(tmp_path / "source", **options)
    names, final = (QWEN, "final_res") if make is qwen3_attnres else (FLA, "res")
    mode = "add" if options.get("mode") == "delta" else "replace"
    expected = by_hand(source, names, final, per_block, IDS, mode, options.get("window_size"))
    report = convert(source, tmp_path / "out")
    found = report.verification
    # against the equations as the package has them: two orders of float32 additions
    assert found.relative_difference < 1e-4 and found.allowed_gap == 1e-3 and found.dtype == "float32"
    assert not found.changed and not found.trained_routing and found.control_differs
    config = DepthRouteConfig.from_pretrained(tmp_path / "out")
    assert (config.depth_block_size, config.depth_anchored) == (layers_per_block, False)
    assert config.preset_name == ("delta" if mode == "add" else "attnres-block" if layers_per_block else "attnres")
    model = DepthRouteForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64)
    got = model(IDS[None]).logits[0]
    # float64 on both sides; rotary angles and their cosines are float32 in transformers: 1e-7 times a few layers
    torch.testing.assert_close(got, expected, atol=2e-5 * expected.std().item(), rtol=0)


LAYERWISE = [
    "qwen3_attnres, blocks of 2, 2 and 1",
    "qwen3_attnres, full",
    "qwen3_attnres, delta",
    "qwen3_attnres in bfloat16",
    "fla with biases and a window",
]


@pytest.mark.parametrize("case", [*LAYERWISE, "tied"])
def test_layer_by_layer_the_same_is_found(case, tmp_path, monkeypatch):
    make, options, *_ = CASES.get(case, (qwen3_attnres, {"tie_word_embeddings": True}))
    source = make(tmp_path / "source", **options)
    if case == "tied":
        edit_weights(source, lambda w: w.pop("lm_head.weight"))
    with monkeypatch.context() as patch:
        patch.setattr(ImportedSource, "load_stock", lambda *a: pytest.fail("the whole source was loaded"))
        found = convert(source, tmp_path / "out", layerwise=True).verification
    # every figure, bit for bit
    assert found == verify(source, tmp_path / "out", layerwise=False)
    assert found.control_differs and found.relative_difference < 1e-4


@pytest.mark.parametrize("case", [LAYERWISE[0], LAYERWISE[-1]])
def test_one_layer_of_the_source_is_in_memory(case, tmp_path, monkeypatch):
    make, options, *_ = CASES[case]
    held, mix = [], AttnResReference.mix

    def count(self, *arguments):
        held.append(
            {name.split(".")[2] for name, p in self.stock.named_parameters() if not p.is_meta and "layers" in name}
        )
        return mix(self, *arguments)

    monkeypatch.setattr(AttnResReference, "mix", count)
    source = make(tmp_path / "source", **options)
    convert(source, tmp_path / "out", layerwise=True)
    layers = json.loads((source / "config.json").read_text())["num_hidden_layers"]
    assert {frozenset(each) for each in held} == {frozenset({str(layer)}) for layer in range(layers)}


def test_the_routing_is_renamed_and_reshaped(tmp_path):
    source = qwen3_attnres(tmp_path / "source")
    tiny_tokenizer().save_pretrained(source)
    report = convert(source, tmp_path / "out")
    theirs, ours = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    assert torch.equal(ours["model.layers.1.mlp_read.query"], theirs["model.layers.1.mlp_res_proj.weight"][0])
    assert torch.equal(ours["model.final_read.key_norm"], theirs["model.final_res_norm.weight"])
    assert len(theirs) - len(ours) == 2 and "model.layers.0.attn_read.query" not in ours  # one source: no effect
    assert report.added_tensors == 0 and report.requested["preset"] is None
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    verify(source, tmp_path / "out").check()


def test_an_import_may_be_anchored(tmp_path):
    source = qwen3_attnres(tmp_path / "source")
    found = convert(source, tmp_path / "out", anchored=True).verification
    assert DepthRouteConfig.from_pretrained(tmp_path / "out").depth_anchored
    # the rms eps of 1e-5, which weighs up to 3² times as much against the mean of three sources as against their sum
    assert 0 < found.relative_difference < 1e-2


def test_a_tied_head_may_be_missing(tmp_path):
    source = qwen3_attnres(tmp_path / "source", tie_word_embeddings=True)
    edit_weights(source, lambda w: w.pop("lm_head.weight"))
    convert(source, tmp_path / "out")
    model = DepthRouteForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64)
    expected = by_hand(source, QWEN, "final_res", 6, IDS)
    torch.testing.assert_close(model(IDS[None]).logits[0], expected, atol=2e-5 * expected.std().item(), rtol=0)


def test_another_function_fails_the_verification(tmp_path, monkeypatch):
    source = qwen3_attnres(tmp_path / "source")
    mix = AttnResReference.mix
    monkeypatch.setattr(AttnResReference, "mix", lambda self, name, sources: mix(self, name, sources[:2]))
    with pytest.raises(CheckFailed, match=r"not equal .*allowed: 0.001 of their std"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options, line", [
    ({"preset": "delta"}, "preset: got delta, but source has routing of its own .*allowed: attnres-block with its own fields"),
    ({"preset": "wav", "block_size": 3}, "depth_detail_bases = .*not \\[\\]"),
    ({"block_size": 2}, "depth_block_size = 2, not 3"),
    ({"num_heads": 2}, "depth_num_heads = 2, not 1"),
])  # fmt: skip
def test_an_import_is_of_its_own_preset(options, line, tmp_path):
    with pytest.raises(Refused, match=line):
        convert(qwen3_attnres(tmp_path / "source"), tmp_path / "out", **options)


# -- what is refused --------------------------------------------------------------------------------------------------

FOREIGN_KEYS = {
    "a recency bias": ("model.layers.0.attn_res_bias", "attn_res_bias"),
    "a route of values": ("model.layers.2.v_res_proj.weight", "v_res_proj"),
    "a null source": ("model.layers.1.mlp_null_source", "mlp_null_source"),
    "a gate": ("model.layers.1.mlp_res_gate_logit", "mlp_res_gate_logit"),
}


@pytest.mark.parametrize("what", FOREIGN_KEYS)
def test_an_unknown_origin_is_refused_by_its_keys(what, tmp_path):
    source = qwen3_attnres(tmp_path / "source")
    key, named = FOREIGN_KEYS[what]
    edit_weights(source, lambda w: w.update({key: torch.zeros(1)}))
    with pytest.raises(
        Refused, match=f"an unknown origin, not that of qwen3_attnres: 1 keys that it does not have: .*{named}"
    ):
        convert(source, tmp_path / "out")


def test_missing_keys_are_named(tmp_path):
    source = qwen3_attnres(tmp_path / "source")
    edit_weights(source, lambda w: [w.pop(f"model.final_res_{name}.weight") for name in ("proj", "norm")])
    with pytest.raises(
        Refused, match="2 of its keys are missing: model.final_res_norm.weight, model.final_res_proj.weight"
    ):
        convert(source, tmp_path / "out")
    other = fla(tmp_path / "other")
    edit_weights(other, lambda w: w.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(
        Refused, match="flash-linear-attention.*: 1 of its keys are missing: model.layers.1.mlp.up_proj"
    ):
        convert(other, tmp_path / "out")


REFUSED = {
    "another mode": (qwen3_attnres, {"attnres_mode": "delta_block"}, "attnres_mode: got 'delta_block', allowed: block, full"),
    "a gate": (qwen3_attnres, {"attnres_gate_type": "sigmoid_scalar"}, "attnres_gate_type: got 'sigmoid_scalar'"),
    "a null source": (qwen3_attnres, {"attnres_use_null_source": True}, "attnres_use_null_source: got True, allowed: False"),
    "no blocks": (qwen3_attnres, {"attnres_num_blocks": 0}, "attnres_num_blocks: got 0, allowed: a whole number ≥ 1"),
    "an unknown entry": (qwen3_attnres, {"attnres_temperature": 2.0}, "attnres_temperature: got 2.0, an entry of an unknown"),
    "quantized": (qwen3_attnres, {"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    "an odd block": (fla, {"attnres_block_size": 3}, "attnres_block_size: got 3, allowed: 1, or an even number of sublayers"),
    "no reads": (fla, {"attnres_block_size": None}, "attnres_block_size: got None"),
    "another activation": (fla, {"hidden_act": "powlu"}, "hidden_act: got 'powlu', allowed: 'swish'"),
    "no positions": (fla, {"rope_theta": None}, "rope_theta: got None, allowed: a number"),
    "another eps of the query norms": (fla, {"qk_norm": True, "norm_eps": 1e-6}, "norm_eps: got 1e-06, allowed: 1e-05 with qk_n"),
    "biases beside query norms": (fla, {"qk_norm": True, "qkv_bias": True}, "qkv_bias: got True, allowed: False with qk_norm"),
    "heads that divide nothing": (fla, {"num_heads": 5}, "num_heads: got 5, allowed: a divisor of hidden_size = 32"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_hosted_exactly_is_refused(what, tmp_path):
    make, change, line = REFUSED[what]
    source = make(tmp_path / "source")
    edit_json(source / "config.json", **change)
    if None in change.values():
        entries = {**json.loads((source / "config.json").read_text()), **change}
        (source / "config.json").write_text(json.dumps(entries))
    with pytest.raises(Refused, match=line):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_code_beside_a_checkpoint_is_refused_unless_it_is_to_be_ignored(tmp_path):
    source = qwen3_attnres(tmp_path / "source", auto_map={"AutoModelForCausalLM": "modeling_x.Qwen3AttnResForCausalLM"})
    (source / "modeling_x.py").write_text("raise SystemExit")
    with pytest.raises(
        Refused, match="auto_map: .* code of its own, .*--ignore-code where .* qwen3_attnres as it is public"
    ):
        convert(source, tmp_path / "out")
    convert(source, tmp_path / "out", ignore_code=True, verify=False)
    assert "modeling_x" not in (tmp_path / "out" / "config.json").read_text()
    assert not (tmp_path / "out" / "modeling_x.py").exists()


def test_fused_projections_are_refused_by_their_shapes(tmp_path):
    source = fla(tmp_path / "source")

    def fuse(w):
        for layer in range(3):
            at = f"model.layers.{layer}.mlp"
            w[f"{at}.gate_proj.weight"] = torch.cat([w[f"{at}.gate_proj.weight"], w.pop(f"{at}.up_proj.weight")])

    edit_weights(source, fuse)
    with pytest.raises(Refused, match="3 of its keys are missing: model.layers.0.mlp.up_proj.weight"):
        convert(source, tmp_path / "out")


def test_there_is_no_way_back_to_their_format(tmp_path, run_cli):
    convert(qwen3_attnres(tmp_path / "source"), tmp_path / "out")
    with pytest.raises(Refused, match="trained routing"):
        revert(tmp_path / "out", tmp_path / "back")
    with pytest.raises(Refused, match="not the source's bytes: .* tensors were computed from what the source stores"):
        revert(tmp_path / "out", tmp_path / "back", drop_routing=True)
    code, out, err = run_cli("revert", tmp_path / "out", tmp_path / "back", "--drop-routing", "--as-is")
    assert code == 0 and "lost with the routing" in out and "nats per token" in out, err
