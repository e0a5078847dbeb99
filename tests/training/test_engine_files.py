# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The packaged configurations, read by the libraries that they are for, as far as a CPU can."""

import json
from functools import partialmethod

import pytest
import torch
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from conftest import ROUTED_PRESETS, tiny_config
from text_model_helpers import run_command
from transformers import TrainingArguments
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from depthroute import DepthRouteForCausalLM
from depthroute.errors import Refused
from depthroute.training.engines import engine_file, engine_files


def test_the_packaged_engines():
    assert {name: file.suffix for name, file in engine_files().items()} == {
        "ddp": ".yaml",
        "fsdp2": ".yaml",
        "zero3": ".json",
        "zero3-offload": ".json",
    }


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_accelerate_reads_its_files(name):
    config = load_config_from_file(str(engine_file(name)))  # refuses keys that it does not know
    assert isinstance(config, ClusterConfig)
    expected = {"ddp": DistributedType.MULTI_GPU, "fsdp2": DistributedType.FSDP}[name]
    assert config.distributed_type == expected and config.mixed_precision == "bf16" and config.num_processes == 8


def test_the_layers_that_fsdp_divides_exist(graft, monkeypatch):
    options = load_config_from_file(str(engine_file("fsdp2"))).fsdp_config
    # as `accelerate launch` hands them to the processes
    monkeypatch.setenv("FSDP_VERSION", str(options["fsdp_version"]))
    monkeypatch.setenv("FSDP_AUTO_WRAP_POLICY", options["fsdp_auto_wrap_policy"])
    monkeypatch.setenv("FSDP_TRANSFORMER_CLS_TO_WRAP", options["fsdp_transformer_layer_cls_to_wrap"])
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", str(options["fsdp_reshard_after_forward"]).lower())
    monkeypatch.setenv("FSDP_STATE_DICT_TYPE", options["fsdp_state_dict_type"])
    model = graft("delta-block")
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    plugin.set_auto_wrap_policy(model)  # refuses a class that the model does not have
    policy = plugin.auto_wrap_policy
    wrapped = [name for name, module in model.named_modules() if policy(module, recurse=False, nonwrapped_numel=0)]
    assert wrapped == [f"model.layers.{index}" for index in range(8)]
    assert options["fsdp_transformer_layer_cls_to_wrap"] in DepthRouteForCausalLM._no_split_modules


class TrainerConfig(HfDeepSpeedConfig):
    """The Trainer's own class without its demand that DeepSpeed be installed: what it fills in and compares."""

    def __init__(self, file):
        super().__init__(file)
        self._dtype, self.mismatches = None, []

    dtype = HfTrainerDeepSpeedConfig.dtype
    is_auto = HfTrainerDeepSpeedConfig.is_auto
    fill_match = HfTrainerDeepSpeedConfig.fill_match
    fill_only = partialmethod(HfTrainerDeepSpeedConfig.fill_match, must_match=False)
    trainer_config_process = HfTrainerDeepSpeedConfig.trainer_config_process
    trainer_config_finalize = HfTrainerDeepSpeedConfig.trainer_config_finalize


@pytest.mark.parametrize("name", ["zero3", "zero3-offload"])
def test_the_trainer_fills_in_what_is_left_to_it(name, graft, tmp_path):
    config = TrainerConfig(str(engine_file(name)))
    assert config.is_zero3() and config.is_offload() == name.endswith("offload")
    args = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=3,
        gradient_accumulation_steps=2,
        bf16=True,
        use_cpu=True,
        max_grad_norm=0.5,
    )
    config.trainer_config_process(args)
    config.trainer_config_finalize(args, graft("delta-block"), 100)  # refuses where the two disagree
    assert config.config["train_micro_batch_size_per_gpu"] == 3 and config.config["train_batch_size"] == 6
    assert config.config["gradient_clipping"] == 0.5 and config.config["bf16"]["enabled"] is True
    assert config.config["zero_optimization"]["reduce_bucket_size"] == 32 * 32
    assert "auto" not in json.dumps(config.config)


@pytest.mark.parametrize("preset", ROUTED_PRESETS)
def test_reads_get_their_values_after_they_were_made(preset):
    """Inside DeepSpeed's `zero.Init` a parameter that was just made is a shard: a value that is set there is lost, or is no value
    of the whole. Here everything that modules set for themselves is thrown away."""
    torch.manual_seed(0)
    expected = DepthRouteForCausalLM(tiny_config(preset)).routing_parameters()
    model = DepthRouteForCausalLM(tiny_config(preset))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    for module in model.modules():
        module._is_hf_initialized = False
    for parameter in model.parameters():
        parameter._is_hf_initialized = False
    model.initialize_weights()
    assert expected and all(parameter.isfinite().all() for parameter in model.parameters())
    for name, parameter in model.routing_parameters().items():
        assert torch.equal(parameter, expected[name]), name


def test_the_command_prints_where_a_file_is(monkeypatch, capsys):
    code, out, _ = run_command(monkeypatch, capsys, "train", "--print-engine", "fsdp2")
    assert (code, out.strip()) == (0, str(engine_file("fsdp2")))
    code, out, _ = run_command(monkeypatch, capsys, "train", "--print_engine=zero3")
    assert (code, out.strip()) == (0, str(engine_file("zero3")))
    code, _, err = run_command(monkeypatch, capsys, "train", "--print-engine", "fsdp")
    assert code == 2 and "print_engine: got 'fsdp', allowed: ddp, fsdp2, zero3" in err
    with pytest.raises(Refused, match="nearest: zero3"):
        engine_file("zero-3")
