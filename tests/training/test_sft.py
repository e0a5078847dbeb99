# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Other trainers take the groups through `optimizers`: trl's SFTTrainer as the example."""

import copy

import pytest
import torch
from datasets import Dataset

from depthroute.training import optimizer_groups, routing_parameters


trl = pytest.importorskip("trl")


def test_supervised_fine_tuning_moves_the_routing(graft, tokenizer, text, tmp_path):
    model = graft("delta-block", depth_anchored=True)
    args = trl.SFTConfig(
        output_dir=str(tmp_path),
        max_steps=2,
        learning_rate=1e-3,
        max_length=32,
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    padding = copy.deepcopy(tokenizer)
    padding.pad_token = padding.eos_token
    optimizer = torch.optim.AdamW(optimizer_groups(model, args.learning_rate, args.weight_decay))
    trainer = trl.SFTTrainer(
        model=model,
        args=args,
        train_dataset=Dataset.from_dict({"text": text.splitlines()}),
        processing_class=padding,
        optimizers=(optimizer, None),
    )
    trainer.train()
    assert torch.isfinite(torch.tensor(trainer.state.log_history[-1]["train_loss"]))
    assert all(p.any() for name, p in routing_parameters(model).items() if name.endswith("query"))
