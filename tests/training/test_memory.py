# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What the memory function says, against what small models keep."""

import json
from functools import cache

import pytest
import torch
from conftest import PRESETS, tiny_config, tiny_qwen3_config

import depthroute.training.memory as memory_module
from depthroute import DepthRouteConfig, DepthRouteForCausalLM
from depthroute.errors import Refused
from depthroute.training.memory import ENGINES, parameter_sizes, training_memory
from depthroute_kernels.benchmarks.measure import saved_bytes


BATCH, TOKENS = 2, 64
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
BLOCKS = ["attnres-block", "delta-block", "rd-attnres", "wav", "dar"]
CASES = {preset: (preset, {}) for preset in PRESETS}
CASES |= {f"{preset} of three": (preset, {"depth_block_size": 3}) for preset in BLOCKS}
CASES |= {
    "experts": ("delta-block", EXPERTS),
    "no query and key norms": ("standard", {"qk_norm": False}),
    "two hyper streams": ("mhc", {"hyper_num_streams": 2}),
    "phase alone": ("wav", {"depth_detail_bases": ["phase"]}),
    "heads": ("attnres-block", {"depth_num_heads": 4}),
    "uniform values": ("rd-attnres", {"depth_value_route": "uniform"}),
}


def config_of(case, layers=6, width=128, **values):
    preset, fields = CASES[case]
    base = tiny_qwen3_config(
        vocab_size=200, num_hidden_layers=layers, hidden_size=width, intermediate_size=320, head_dim=16
    )
    return tiny_config(preset, base=base, **{**fields, **values})


def measured(config, checkpointing=False, dtype=torch.float32, autocast=False) -> int:
    return _measured(config.to_json_string(), checkpointing, dtype, autocast)


@cache  # several tests look at the same model
def _measured(fields, checkpointing, dtype, autocast) -> int:
    config = DepthRouteConfig(**json.loads(fields))
    model = DepthRouteForCausalLM(config).to(dtype).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(200, (BATCH, TOKENS), generator=torch.Generator().manual_seed(0))

    def forward():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(ids, labels=ids, use_cache=False).loss

    return saved_bytes(model, forward)


def expected(config, precision="float32", checkpointing=False) -> int:
    """What of the function's terms is kept from forward to backward: of the head, not logits and their gradient."""
    memory = training_memory(
        config, batch_size=BATCH, sequence_length=TOKENS, precision=precision, checkpointing=checkpointing
    )
    c = 4 if precision == "float32" else 2
    head = memory.head - BATCH * TOKENS * (4 + c) * config.vocab_size
    return memory.activations + memory.sources // (2 if checkpointing else 1) + head


@pytest.mark.parametrize("anchored", [False, True], ids=["plain", "anchored"])
@pytest.mark.parametrize("case", CASES)
def test_activations_are_those_that_autograd_keeps(case, anchored):
    if anchored and config_of(case).residual_type in ("standard", "rezero", "layerscale", "hyper_connection"):
        pytest.skip("no anchored form")
    config = config_of(case, **({"depth_anchored": True} if anchored else {}))
    # 3%: sums, maxima and 1/rms of phases, and of anchored blocks one or two tensors at the start, are not counted. A source per
    # sublayer is 14%, the norm of a value route 3.5% for each layer that has one
    assert expected(config) == pytest.approx(measured(config), rel=0.03)


@pytest.mark.parametrize("case", CASES)
def test_what_checkpointed_layers_keep(case):
    config = config_of(case)
    # 10%: of a few tensors; one more or less for each layer is 20 to 40%
    assert expected(config, checkpointing=True) == pytest.approx(measured(config, checkpointing=True), rel=0.1)


@pytest.mark.parametrize("layers", [6, 9])
@pytest.mark.parametrize("case", ["standard", "attnres", "delta-block", "rd-attnres", "wav", "dar"])
def test_sources_alone(case, layers):
    """The same against what a stock model of that size keeps, where the branches cannot hide an error."""
    config, stock = config_of(case, layers), config_of("standard", layers)
    sources = training_memory(config, batch_size=BATCH, sequence_length=TOKENS).sources
    more = measured(config) - measured(stock)
    # 1/8: what is not counted above, now of the sources alone; and for delta-block, with its one source per block, one number per
    # token and phase is a tenth of them
    assert sources == pytest.approx(more, rel=0.125, abs=BATCH * TOKENS * 4 * 16)


@pytest.mark.parametrize(
    "case", ["standard", "attnres", "delta", "delta-block", "attnres-block", "wav", "dar", "mhc", "experts"]
)
@pytest.mark.parametrize("precision", ["mixed", "autocast"])
def test_sixteen_bits(precision, case):
    config = config_of(case)
    options = {"autocast": True} if precision == "autocast" else {"dtype": torch.bfloat16}
    # 4%: as above, with statistics and logits in float32 beside sources of 16 bits
    assert expected(config, precision) == pytest.approx(measured(config, **options), rel=0.04)


@pytest.mark.parametrize("case", ["delta-block", "wav", "dar", "mhc", "experts"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_parameters_gradients_and_optimizer_are_exact(case, tied):
    config = config_of(case, tie_word_embeddings=tied)
    model = DepthRouteForCausalLM(config)
    ids = torch.randint(200, (2, 9))
    model(ids, labels=ids).loss.backward()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    memory = training_memory(config, batch_size=1, sequence_length=1)
    assert memory.parameters == sum(p.nbytes for p in model.parameters())
    assert memory.gradients == sum(p.grad.nbytes for p in model.parameters())
    moments = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    assert memory.optimizer == sum(value.nbytes for value in moments)
    assert parameter_sizes(config).routing == sum(p.numel() for p in model.routing_parameters().values())


def test_engines_divide_what_they_divide():
    config = config_of("delta-block")
    one = training_memory(config, batch_size=1, sequence_length=8)
    by_engine = {
        name: training_memory(config, batch_size=1, sequence_length=8, engine=name, devices=4)
        for name in ("ddp", "fsdp", "zero1", "zero2", "zero3")
    }
    assert by_engine["ddp"].states == one.states and by_engine["ddp"].communication == one.gradients
    assert by_engine["fsdp"].states == pytest.approx(one.states / 4, abs=4)
    # the working copy, in float32 here: a quarter more of states
    assert by_engine["zero3"].states == pytest.approx(one.states / 4 * 1.25, abs=4)
    assert by_engine["zero1"].communication == by_engine["zero2"].communication == one.gradients
    assert one.communication == 0 < by_engine["fsdp"].communication
    assert all(memory.activations == one.activations for memory in by_engine.values())
    assert one.total == sum(one)


# bytes of each parameter on one of four devices under bf16, at 2 of a working copy and 4 of a master: weights (working copy and
# master), gradients, moments
PER_PARAMETER = {
    "single": (4, 4, 8),
    "ddp": (4, 4, 8),
    "fsdp": (4 / 4, 4 / 4, 8 / 4),
    "zero1": (2 + 4 / 4, 2, 8 / 4),
    "zero2": (2 + 4 / 4, 4 / 4, 8 / 4),
    "zero3": (2 / 4 + 4 / 4, 4 / 4, 8 / 4),
}


@pytest.mark.parametrize("engine", ENGINES)
def test_what_each_engine_divides(engine):
    config = config_of("delta-block")
    memory = training_memory(
        config, batch_size=1, sequence_length=8, engine=engine, devices=4, precision="mixed", checkpointing=True
    )
    parameters = parameter_sizes(config).total
    expected = [number * parameters for number in PER_PARAMETER[engine]]
    assert [memory.parameters, memory.gradients, memory.optimizer] == pytest.approx(expected, abs=2)


@pytest.mark.parametrize("engine", ["zero1", "zero2", "zero3"])
def test_masters_and_gradients_of_zero_are_of_what_is_trained(engine):
    """With adapters the rest of the model is there in the working precision alone."""
    config = config_of("delta-block")
    memory = training_memory(
        config, batch_size=1, sequence_length=8, engine=engine, devices=2, precision="mixed", trained=1000
    )
    weights = 2 * parameter_sizes(config).total / (2 if engine == "zero3" else 1)
    assert memory.parameters == pytest.approx(weights + 2000, abs=2)
    assert (memory.gradients, memory.optimizer) == (2000, 4000)


def test_zero_sends_no_more_than_a_bucket_at_a_time(monkeypatch):
    config = config_of("delta-block")
    options = {"batch_size": 1, "sequence_length": 8, "precision": "mixed"}
    monkeypatch.setattr(memory_module, "ZERO_BUCKET", 5000)
    for engine in ("zero1", "zero2"):
        assert training_memory(config, engine=engine, devices=2, **options).communication == 2 * 5000
        assert training_memory(config, engine=engine, devices=2, trained=1000, **options).communication == 2 * 1000
        assert training_memory(config, engine=engine, devices=1, **options).communication == 0


def test_adapters_train_few():
    memory = training_memory(config_of("delta-block"), batch_size=1, sequence_length=8, trained=1000)
    assert (memory.gradients, memory.optimizer) == (4000, 8000)


def test_refusals_name_the_field():
    config = DepthRouteConfig(num_hidden_layers=2)
    with pytest.raises(
        Refused, match="engine: got 'fdsp', allowed: single, ddp, fsdp, zero1, zero2, zero3; nearest: fsdp"
    ):
        training_memory(config, batch_size=1, sequence_length=1, engine="fdsp")
    with pytest.raises(Refused, match="precision: got 'bf16'"):
        training_memory(config, batch_size=1, sequence_length=1, precision="bf16")
    with pytest.raises(Refused, match="devices: got 0, allowed: at least 1"):
        training_memory(config, batch_size=1, sequence_length=1, devices=0)
