# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""FP8 checkpoints with scales: every value is its FP8 number times the scale of its block, rounded once. Other kinds of
quantized weights are refused, with what to do instead."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from conftest import tiny_qwen3_config
from conversion_helpers import edit_json, edit_weights, save_checkpoint, tiny_moe_config
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM, Qwen3Model, Qwen3MoeForCausalLM

from depthroute import DepthRouteConfig, DepthRouteForCausalLM, convert, revert, verify
from depthroute.errors import CheckFailed, Refused
from depthroute_conversion.fp8 import dequantize
from depthroute_conversion.source import open_source


BLOCK = 16  # 48 is three blocks; 40 is two and a half; 97 rows of vocabulary are not quantized
SETTINGS = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK],
    "modules_to_not_convert": ["lm_head", "model.layers.1.mlp.down_proj"],
}  # fmt: skip
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def spread(scale: torch.Tensor, shape: torch.Size, block: int = BLOCK) -> torch.Tensor:
    """A scale for every element of a matrix, by its position, one at a time."""
    rows, columns = torch.arange(shape[-2]) // block, torch.arange(shape[-1]) // block
    return scale[..., rows[:, None], columns[None, :]]


def quantize(weight: torch.Tensor, block: int = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 values and scales [⌈R/block⌉, ⌈C/block⌉], each block by its own largest value."""
    rows, columns = -(-weight.shape[0] // block), -(-weight.shape[1] // block)
    padded = torch.zeros(rows * block, columns * block)
    padded[: weight.shape[0], : weight.shape[1]] = weight.float()
    scale = padded.view(rows, block, columns, block).abs().amax(dim=(1, 3)) / LARGEST
    return (weight.float() / spread(scale, weight.shape, block)).to(torch.float8_e4m3fn), scale


def is_quantized(key: str) -> bool:
    return "_proj.weight" in key and "layers.1.mlp.down_proj" not in key


def write_fp8(model, folder: Path, settings: dict = SETTINGS, block: int = BLOCK) -> dict[str, torch.Tensor]:
    """A checkpoint in FP8; returns what its tensors stand for, in bfloat16."""
    save_checkpoint(model.to(torch.bfloat16), folder)
    meant: dict[str, torch.Tensor] = {}

    def change(weights: dict) -> None:
        for key in list(weights):
            meant[key] = weights[key]
            if is_quantized(key):
                weights[key], scale = quantize(weights[key], block)
                weights[f"{key}_scale_inv"] = scale.bfloat16()
                exact = weights[key].double() * spread(scale.bfloat16(), weights[key].shape, block).double()
                meant[key] = exact.float().bfloat16()  # a product of 4 and 8 significant bits is exact in float32

    edit_weights(folder, change)
    edit_json(folder / "config.json", quantization_config=settings)
    return meant


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("fp8") / "tiny-FP8"
    model = Qwen3ForCausalLM(tiny_qwen3_config(num_hidden_layers=4, intermediate_size=40))
    return folder, write_fp8(model, folder)


@pytest.fixture
def damaged(dense, tmp_path):
    """A copy that a test may damage."""
    return Path(shutil.copytree(dense[0], tmp_path / "source"))


def plain_folder(fp8: Path, meant: dict[str, torch.Tensor], folder: Path) -> Path:
    """The checkpoint that the FP8 one stands for, as transformers would have saved it."""
    shutil.copytree(fp8, folder)
    edit_json(folder / "config.json", quantization_config=None)
    edit_weights(folder, lambda w: (w.clear(), w.update(meant)))
    return folder


def test_blocks_are_multiplied_by_their_scales(dense, tmp_path):
    source, meant = dense
    report = convert(source, tmp_path / "out")
    assert report.verification.bitwise_equal and report.dtype == "bfloat16"
    assert report.decisions == ["quantization_config: 27 tensors of FP8 with scales, dequantized to bfloat16"]
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(written[key], tensor) for key, tensor in meant.items())
    assert not any("scale" in key for key in written) and len(written) == len(meant) + report.added_tensors
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    plain = plain_folder(source, meant, tmp_path / "plain")
    stock = AutoModelForCausalLM.from_pretrained(plain)
    ours = DepthRouteForCausalLM.from_pretrained(tmp_path / "out")
    for parameter in (*ours.parameters(), *stock.parameters()):
        parameter.data = parameter.data.clone()  # equal alignment
    ids = torch.arange(1, 40).unsqueeze(0)
    assert torch.equal(ours(ids).logits, stock(ids).logits)
    verify(source, tmp_path / "out").check()
    verify(plain, tmp_path / "out").check()


def test_a_changed_scale_is_another_model(dense, damaged, tmp_path):
    convert(dense[0], tmp_path / "out", verify=False)
    edit_weights(damaged, lambda w: w["model.layers.2.mlp.up_proj.weight_scale_inv"][1, 1].mul_(2))
    with pytest.raises(CheckFailed, match="1 other parameters are not the source's: model.layers.2.mlp.up_proj.weight"):
        verify(damaged, tmp_path / "out").check()


def test_one_tensor_at_a_time_and_what_is_verbatim(dense):
    opened = open_source(dense[0])
    quantized, plain = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(opened.read(quantized), dense[1][quantized])
    assert not opened.is_verbatim(quantized) and opened.is_verbatim(plain)
    assert set(opened.shapes()) == set(opened.dtypes()) == set(dense[1])
    assert set(opened.dtypes().values()) == {opened.dtype()} == {torch.bfloat16}


@pytest.mark.parametrize("shape", [(130, 300), (128, 128), (1, 1), (5, 257)])
def test_edges_that_are_no_whole_block(shape):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    grid = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128), generator=generator)
    expected = values.float() * spread(grid, torch.Size(shape), 128)
    assert torch.equal(dequantize(values, grid, (128, 128), torch.float32), expected)
    assert torch.equal(dequantize(values, grid, (128, 128), torch.bfloat16), expected.bfloat16())


def test_every_number_of_the_format():
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(16, 16)
    scale = torch.tensor([[0.37]])
    exponents, mantissas = (torch.arange(256) >> 3) & 15, torch.arange(256) & 7
    sign = 1 - 2.0 * (torch.arange(256) >> 7)
    numbers = torch.where(exponents == 0, mantissas / 8 * 2.0**-6, (1 + mantissas / 8) * 2.0 ** (exponents - 7)) * sign
    numbers[(exponents == 15) & (mantissas == 7)] = float("nan")
    found = dequantize(values, scale, (128, 128), torch.float32).flatten()
    assert torch.equal(found.nan_to_num(), (numbers.float() * 0.37).nan_to_num()) and found.isnan().sum() == 2


def per_tensor(folder: Path, weights: dict) -> None:
    for key in [key for key in weights if key.endswith("_scale_inv")]:
        matrix = key.removesuffix("_scale_inv")
        scale = weights[key].float().amax()
        whole = weights[matrix].float() * spread(weights[key], weights[matrix].shape)
        weights[matrix], weights[key] = (whole / scale).to(torch.float8_e4m3fn), scale
        weights[matrix.replace(".weight", ".activation_scale")] = torch.tensor(0.1)


def test_one_scale_for_a_matrix(dense, damaged, tmp_path):
    edit_weights(damaged, lambda w: per_tensor(damaged, w))
    settings = {**SETTINGS, "weight_block_size": None, "activation_scheme": "static"}
    edit_json(damaged / "config.json", quantization_config=settings)
    report = convert(damaged, tmp_path / "out")
    assert report.verification.bitwise_equal
    assert report.decisions[1:] == ["27 scales of activations left out: inputs are no longer rounded to FP8"]
    weights, written = load_file(damaged / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    key = "model.layers.3.mlp.gate_proj.weight"
    assert torch.equal(written[key], (weights[key].float() * weights[f"{key}_scale_inv"]).bfloat16())


@pytest.mark.parametrize("fused", [False, True])
def test_experts(fused, tmp_path):
    torch.manual_seed(0)
    config = tiny_moe_config(num_hidden_layers=2, moe_intermediate_size=16)
    meant = write_fp8(Qwen3MoeForCausalLM(config), tmp_path / "source")
    if fused:

        def stack(weights: dict) -> None:
            prefix = "model.layers.0.mlp.experts"
            for ending in ("weight", "weight_scale_inv"):
                parts = {
                    name: [weights.pop(f"{prefix}.{index}.{name}.{ending}").view(torch.uint8) for index in range(4)]
                    for name in ("gate_proj", "up_proj", "down_proj")
                }
                kind = torch.float8_e4m3fn if ending == "weight" else torch.bfloat16
                both = [torch.cat(pair) for pair in zip(parts["gate_proj"], parts["up_proj"])]
                for name, matrices in (("gate_up_proj", both), ("down_proj", parts["down_proj"])):
                    weights[f"{prefix}.{name}{ending.removeprefix('weight')}"] = torch.stack(matrices).view(kind)

        edit_weights(tmp_path / "source", stack)
    report = convert(tmp_path / "source", tmp_path / "out")
    assert report.verification.bitwise_equal and report.verification.control_differs
    model = DepthRouteForCausalLM.from_pretrained(tmp_path / "out")
    experts = model.model.layers[0].mlp.experts
    for index in range(4):
        gate, up = (meant[f"model.layers.0.mlp.experts.{index}.{name}.weight"] for name in ("gate_proj", "up_proj"))
        assert torch.equal(experts.gate_up_proj[index], torch.cat([gate, up]))
        assert torch.equal(experts.down_proj[index], meant[f"model.layers.0.mlp.experts.{index}.down_proj.weight"])


def test_a_model_without_a_head_and_without_a_type(tmp_path):
    torch.manual_seed(0)
    write_fp8(Qwen3Model(tiny_qwen3_config(num_hidden_layers=2)), tmp_path / "source")
    edit_json(tmp_path / "source" / "config.json", dtype=None)
    report = convert(tmp_path / "source", tmp_path / "out")
    assert report.verification.bitwise_equal and report.dtype == "bfloat16"  # of the tensors that are not quantized


def test_the_type_that_the_configuration_names(dense, damaged, tmp_path):
    edit_json(damaged / "config.json", dtype="float32")
    convert(damaged, tmp_path / "out")
    weights, written = load_file(damaged / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    key = "model.layers.3.mlp.gate_proj.weight"
    exact = weights[key].float() * spread(weights[f"{key}_scale_inv"].float(), weights[key].shape)
    assert (
        torch.equal(written[key], exact) and DepthRouteConfig.from_pretrained(tmp_path / "out").dtype == torch.float32
    )


KEY = "model.layers.2.mlp.up_proj.weight"


def quantization(**values):
    return lambda folder: edit_json(folder / "config.json", quantization_config={**SETTINGS, **values})


def weights(change):
    return lambda folder: edit_weights(folder, change)


DAMAGES = {
    "no scale": (weights(lambda w: w.pop(f"{KEY}_scale_inv")), f"{KEY}: got FP8 without a scale, allowed: each with its scale_inv"),
    "a scale of nothing": (
        weights(lambda w: w.update({KEY: torch.ones(40, 32)})),
        f"{KEY}_scale_inv: got scales of no FP8 tensor, allowed: one for each",
    ),
    "another grid": (
        weights(lambda w: w.update({f"{KEY}_scale_inv": torch.ones(3, 3)})),
        rf"{KEY}_scale_inv: got \[3, 3\] of float32, allowed: \[3, 2\] by the blocks \[16, 16\], in a plain type",
    ),
    "blocks of another size": (quantization(weight_block_size=[8, 16]), r"_scale_inv: got \[.*\] of bfloat16, allowed: \["),
    "no blocks": (quantization(weight_block_size=None), r"allowed: \[\] or \[1\] or \[1, 1\] by the blocks None"),
    "a block size that is none": (quantization(weight_block_size=[128]), r"weight_block_size: got \[128\], allowed: two sizes ≥ 1"),
    "another number format": (quantization(fmt="e5m2"), "fmt: got 'e5m2', allowed: 'e4m3'"),
    "a scale that is not finite": (
        weights(lambda w: w[f"{KEY}_scale_inv"][0, 0].fill_(float("inf"))),
        f"{KEY}_scale_inv: got values that are not finite",
    ),
    "e5m2": (weights(lambda w: w.update({KEY: w[KEY].float().to(torch.float8_e5m2)})), f"{KEY}: dtype: got F8_E5M2, allowed:"),
    "without its entry": (
        lambda folder: edit_json(folder / "config.json", quantization_config=None),
        r"dtype: got F8_E4M3, allowed: F64, F32, BF16, F16 \(unquantized weights\)",
    ),
    "awq": (
        quantization(quant_method="awq"),
        "quantization_config: got 'awq', allowed: unquantized weights, or quant_method 'fp8' with scales; instead convert the "
        "checkpoint that it was quantized from, and quantize the conversion",
    ),
    "gptq": (quantization(quant_method="gptq"), "got 'gptq', .*instead convert the checkpoint that it was quantized from, and"),
    "bitsandbytes": (quantization(quant_method=None, load_in_4bit=True), "got 'bitsandbytes', .*load the conversion with a BitsAndBytesConfig"),
    "compressed-tensors": (quantization(quant_method="compressed-tensors"), "got 'compressed-tensors', .*or one of its publisher's with"),
    "something new": (quantization(quant_method="mystery"), "got 'mystery', .*instead convert the checkpoint that it was quantized from"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGES)
def test_what_is_refused(case, damaged, tmp_path):
    damage, message = DAMAGES[case]
    damage(damaged)
    with pytest.raises(Refused, match=message):
        convert(damaged, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_fused_experts_whose_halves_share_a_block(tmp_path):
    torch.manual_seed(0)
    save_checkpoint(
        Qwen3MoeForCausalLM(tiny_moe_config(num_hidden_layers=2, moe_intermediate_size=24)), tmp_path / "source",
        save_original_format=False,
    )  # fmt: skip
    key = "model.layers.0.mlp.experts.gate_up_proj"
    edit_weights(
        tmp_path / "source",
        lambda w: w.update({key: w[key].to(torch.float8_e4m3fn), f"{key}_scale_inv": torch.ones(4, 3, 2)}),
    )
    edit_json(tmp_path / "source" / "config.json", quantization_config=SETTINGS)
    with pytest.raises(Refused, match=f"{key}: got 24 rows of each expert's gate, allowed: a multiple of 16"):
        convert(tmp_path / "source", tmp_path / "out")
    assert os.listdir(tmp_path) == ["source"]


def test_there_is_no_way_back_to_fp8(dense, tmp_path):
    convert(dense[0], tmp_path / "out", verify=False)
    with pytest.raises(Refused, match="not the source's bytes: .* tensors were computed from what the source stores"):
        revert(tmp_path / "out", tmp_path / "back")
    assert not revert(tmp_path / "out", tmp_path / "back", as_is=True).identical
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert all(torch.equal(value, dense[1][key]) for key, value in model.state_dict().items() if key in dense[1])
