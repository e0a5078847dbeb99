# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The health callback: its numbers against diagnostics', what it leaves alone, and each warning provoked and absent."""

import pytest
import torch
from conftest import randomize_routing, tiny_config
from peft import get_peft_model
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import Trainer, TrainerCallback, TrainingArguments

from depthroute.diagnostics import record_routing, routing_statistics
from depthroute.errors import Refused
from depthroute.modeling.residual_base import RoutingWeights
from depthroute.training import (
    DepthRouteTrainer,
    DepthRouteTrainingArguments,
    RoutingHealthCallback,
    lora_config,
    optimizer_groups,
    parse_arguments,
    routing_parameters,
)
from depthroute.training.health import PATIENCE
from depthroute.training.loss_spikes import SpikeDetector
from depthroute.training.routing_statistics import COLLAPSED_WEIGHT, StatisticsRecord, depth_label
from depthroute.training.run import train


@pytest.fixture(scope="module")
def rows() -> list[dict[str, torch.Tensor]]:
    """32 examples of 12 tokens, half of them with four tokens of padding in front."""
    ids = torch.randint(1, 97, (32, 12), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[::2, :4] = 0
    return [{"input_ids": i, "attention_mask": m, "labels": i.where(m.bool(), -100)} for i, m in zip(ids, mask)]


def settings(folder, **values) -> dict:
    base = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "max_steps": 6,
        "learning_rate": 1e-3,
        "logging_steps": 2,
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return {**base, **values}


def trainer_of(model, folder, rows, health: int | None = 1, **values) -> DepthRouteTrainer:
    args = DepthRouteTrainingArguments(**settings(folder, routing_health_steps=health, **values))
    return DepthRouteTrainer(model=model, args=args, train_dataset=rows)


def health_of(trainer) -> RoutingHealthCallback:
    [callback] = [c for c in trainer.callback_handler.callbacks if isinstance(c, RoutingHealthCallback)]
    return callback


def measured(trainer) -> dict[int, dict[str, float]]:
    return {e["step"]: e for e in trainer.state.log_history if any(name.startswith("routing_gradient") for name in e)}


# --- numbers


@pytest.mark.smoke
@pytest.mark.parametrize("preset", ["attnres-block", "delta", "rd-attnres", "dar"])
@pytest.mark.parametrize("heads", [1, 2])
def test_numbers_are_those_of_diagnostics_without_the_padding(preset, heads, graft, rows, tmp_path):
    model = graft(preset, depth_anchored=True, depth_num_heads=heads)
    randomize_routing(model)
    batch = {name: torch.stack([row[name] for row in rows[:4]]) for name in rows[0]}
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    expected = routing_statistics(record_routing(model, [inputs]))
    model.train()
    record = StatisticsRecord(model.config, batch["attention_mask"].bool())
    model.model(batch["input_ids"], attention_mask=batch["attention_mask"], routing=record)
    found = record.statistics()
    assert len(found) == sum(len(reads) for reads in expected.values())
    for route, reads in expected.items():
        for name, statistics in reads.items():
            label = depth_label(name)
            if label not in found:
                label += f"/{route.replace(' ', '_')}"
            # float32 against float64
            assert found[label].max_weight == pytest.approx(statistics.max_weight, rel=1e-5)
            assert found[label].normalized_entropy == pytest.approx(statistics.entropy_normalized, rel=1e-4)
            means = statistics.mean_weights
            assert found[label].top_source == statistics.sources[means.index(max(means))]


def test_collapse_counts_choices_above_the_threshold():
    config = tiny_config("delta", depth_num_heads=2)
    weights = torch.full((2, 1, 3, 2), 0.5)
    weights[0, 0, 0] = weights[0, 0, 1, 0] = COLLAPSED_WEIGHT
    weights[1, 0, 0] = weights[1, 0, 1, 0] = 1 - COLLAPSED_WEIGHT
    for keep, expected in ((None, 3 / 6), (torch.tensor([[True, True, False]]), 3 / 4)):
        record = StatisticsRecord(config, keep)
        record.note("model.layers.3.attn_read", RoutingWeights(["embedding", "block 0"], weights))
        assert record.statistics()["03_attn"].collapsed == pytest.approx(expected)


class Reporter(TrainerCallback):
    """What a reporting integration is told."""

    def __init__(self):
        self.told = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.told.append((state.global_step, dict(logs)))


def test_numbers_go_to_every_reporter_by_depth(graft, rows, tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    model = graft("rd-attnres", depth_anchored=True)
    trainer = trainer_of(
        model, tmp_path, rows, health=2, logging_steps=4, max_grad_norm=0.05, report_to=["tensorboard"]
    )
    reporter = Reporter()
    trainer.add_callback(reporter)
    norms = {}

    class Gradients(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            for name, parameter in routing_parameters(model).items():
                norms.setdefault(state.global_step + 1, {})[name] = parameter.grad.clone()

    trainer.add_callback(Gradients())
    trainer.train()
    entries = measured(trainer)
    assert list(entries) == [2, 4, 6]
    told = {step: logs for step, logs in reporter.told if "routing_max_weight/mean" in logs}
    for step, entry in entries.items():
        assert told[step].items() <= entry.items()
        weights = {name for name in entry if name.startswith("routing_max_weight/")}
        labels = [f"{layer:02d}_{branch}" for layer in range(8) for branch in ("attn", "mlp")][1:]
        routes = [f"{label}{route}" for label in labels for route in (["/main", "/value"] if "attn" in label else [""])]
        assert weights == {f"routing_max_weight/{label}" for label in [*routes, "final", "mean"]}
        assert {name.replace("normalized_entropy", "max_weight") for name in entry if "entropy" in name} == weights
        for label, part in (
            ("03_attn", "layers.3.attn_read"),
            ("03_mlp", "layers.3.mlp_read"),
            ("final", "final_read"),
        ):
            own = torch.cat([gradient for name, gradient in norms[step].items() if part in name])
            assert entry[f"routing_gradient_norm/{label}"] == pytest.approx(own.norm().item(), rel=1e-5)
        assert 0 < entry["routing_gradient_norm/total"] <= 0.05 * 1.001  # as clipped
    board = EventAccumulator(str(tmp_path / "board")).Reload()
    assert "train/routing_normalized_entropy/03_mlp" in board.Tags()["scalars"]
    assert [event.step for event in board.Scalars("train/routing_gradient_norm/total")] == [2, 4, 6]


def test_weights_are_those_of_the_forward_pass_that_trains(graft, rows, tmp_path):
    """Uniform in the first step of a conversion, whatever the read; no longer once it has learned."""
    trainer = trainer_of(graft("attnres-block", depth_anchored=True), tmp_path, rows, routing_learning_rate=0.03)
    trainer.train()
    entries = measured(trainer)
    assert entries[1]["routing_normalized_entropy/mean"] == pytest.approx(1, abs=1e-6)
    assert entries[1]["routing_max_weight/03_mlp"] == pytest.approx(1 / 3, abs=1e-6)  # e, one block, the running one
    assert entries[6]["routing_normalized_entropy/mean"] < 0.9999


@pytest.mark.parametrize("preset", ["delta", "attnres-block", "dar"])
def test_training_is_not_changed_and_no_pass_is_added(preset, graft, rows, tmp_path):
    passes, ends = {}, {}
    for health in (None, 2):
        model = graft(preset, depth_anchored=True)
        model.model.embed_tokens.register_forward_hook(
            lambda *_, key=health: passes.update({key: passes.get(key, 0) + 1})
        )
        trainer = trainer_of(model, tmp_path, rows, health, max_steps=3, gradient_accumulation_steps=2)
        trainer.train()
        ends[health] = model.state_dict()
        assert not model.model._forward_pre_hooks or health is None
        assert bool(measured(trainer)) == (health is not None)
    assert passes[None] == passes[2] == 6
    for name, tensor in ends[None].items():
        # the same equations; where weights are asked for a sum may be taken in another order
        torch.testing.assert_close(tensor, ends[2][name], rtol=1e-4, atol=1e-6)


WRAPPED = {
    "adapted": {"peft": True},
    "checkpointing": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "adapted, reentrant": {
        "peft": True,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "bfloat16 autocast": {"bf16": True},
}


@pytest.mark.parametrize("options", WRAPPED.values(), ids=WRAPPED)
def test_wrappers_make_no_difference(options, graft, rows, tmp_path):
    def run(**values) -> dict[int, dict[str, float]]:
        model = graft("attnres-block", depth_anchored=True)
        randomize_routing(model)
        if values.pop("peft", False):
            model = get_peft_model(model, lora_config(model))
        # without clipping, which goes by the norm of all that is trained
        trainer = trainer_of(model, tmp_path, rows, max_steps=2, max_grad_norm=0, **values)
        trainer.train()
        assert health_of(trainer).warnings == []
        return measured(trainer)

    plain, wrapped = run(), run(**options)
    assert plain.keys() == wrapped.keys() == {1, 2}
    rough = options.get(
        "bf16", False
    )  # 8 bits through eight sublayers: the weights are near, gradients are another matter
    for name, value in plain[1].items():
        if name.startswith("routing") and not (rough and "gradient" in name):
            close = pytest.approx(value, abs=0.05) if rough else pytest.approx(value, rel=1e-4, abs=1e-6)
            assert wrapped[1][name] == close, name
        assert name in wrapped[1]


@pytest.mark.parametrize("preset", ["rezero", "layerscale", "mhc"])
def test_baselines_have_gradients_by_depth_and_no_weights(preset, graft, rows, tmp_path):
    trainer = trainer_of(graft(preset, depth_anchored=True), tmp_path, rows, max_steps=2)
    trainer.train()
    entry = measured(trainer)[2]
    assert entry["routing_gradient_norm/03_attn"] > 0 and not any("max_weight" in name for name in entry)
    assert health_of(trainer).warnings == []


def test_a_model_without_routing_is_left_alone(graft, rows, tmp_path):
    trainer = trainer_of(graft("standard"), tmp_path, rows, max_steps=2)
    trainer.train()
    assert not measured(trainer) and health_of(trainer).warnings == []


def test_plain_trainer_takes_it_too(graft, rows, tmp_path):
    model = graft("delta-block", depth_anchored=True)
    optimizer = torch.optim.AdamW(optimizer_groups(model, 1e-3, 0.1))
    args = TrainingArguments(**settings(tmp_path, logging_steps=3))
    trainer = Trainer(model=model, args=args, train_dataset=rows, optimizers=(optimizer, None))
    trainer.add_callback(RoutingHealthCallback(trainer, steps=2))
    trainer.train()
    assert list(measured(trainer)) == [2, 4, 6] and health_of(trainer).warnings == []


# --- warnings: each is provoked, and absent from runs in which nothing is wrong


@pytest.mark.parametrize("preset", ["delta", "attnres-block", "wav", "rd-attnres", "dar", "mhc"])
def test_nothing_is_said_of_a_conversion_that_trains_well(preset, graft, rows, tmp_path, caplog):
    """From the start, where many parameters have no gradient yet, through a warm-up that begins at a rate of zero."""
    values = {"dual_gates": "dynamic"} if preset == "dar" else {}
    model = graft(preset, depth_anchored=True, **values)
    trainer = trainer_of(model, tmp_path, rows, max_steps=8, warmup_steps=3, logging_steps=1)
    trainer.train()
    assert health_of(trainer).warnings == []
    assert not [record for record in caplog.records if record.name.startswith("depthroute")]


def test_too_fast_a_routing_is_warned_of_once(graft, rows, tmp_path, caplog):
    def plain_trainer(rate: float) -> list[str]:
        model = graft("delta", depth_anchored=True)
        args = TrainingArguments(**settings(tmp_path, learning_rate=rate, max_steps=1, warmup_steps=1))
        trainer = Trainer(model=model, args=args, train_dataset=rows)
        trainer.add_callback(RoutingHealthCallback(trainer, steps=10))
        trainer.train()
        return health_of(trainer).warnings

    [warning] = plain_trainer(0.04)  # width 32
    assert warning.startswith("routing_learning_rate: got 0.04, with which a routing logit moves by up to about 1.3")
    assert "at or below 0.03 it should not" in warning
    assert plain_trainer(0.03) == []
    # a group of its own was warned of when it was made
    caplog.clear()
    trainer = trainer_of(graft("delta", depth_anchored=True), tmp_path, rows, max_steps=1, routing_learning_rate=0.04)
    trainer.train()
    assert caplog.text.count("routing_learning_rate: got 0.04") == 1


def test_a_router_without_gradient_is_warned_of(graft, rows, tmp_path):
    model = graft("delta", depth_anchored=True)
    for parameter in model.model.layers[3].attn_read.parameters():
        parameter.register_hook(torch.zeros_like)
    trainer = trainer_of(model, tmp_path, rows, max_steps=PATIENCE + 2)
    trainer.train()
    [warning] = [text for text in health_of(trainer).warnings if "gradient" in text]
    assert warning.startswith("dead routers: the gradient of read 03_attn was exactly zero 3 times in a row")
    assert "routing_learning_rate" in warning and "use_reentrant" in warning


def test_routers_that_no_optimizer_holds_are_warned_of(graft, rows, tmp_path):
    model = graft("delta", depth_anchored=True)
    routing = {id(parameter) for parameter in routing_parameters(model).values()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if id(p) not in routing], lr=1e-3)
    args = TrainingArguments(**settings(tmp_path, max_steps=PATIENCE + 1))
    trainer = Trainer(model=model, args=args, train_dataset=rows, optimizers=(optimizer, None))
    trainer.add_callback(RoutingHealthCallback(trainer, steps=1))
    trainer.train()
    [warning] = health_of(trainer).warnings
    assert warning.startswith(
        "dead routers: the parameters of 15 reads (00_mlp, 01_attn, 01_mlp, 02_attn, ...) have not moved"
    )
    assert "optimizer_groups" in warning


def test_nothing_is_said_of_a_routing_whose_rate_is_zero(graft, rows, tmp_path):
    trainer = trainer_of(graft("delta"), tmp_path, rows, max_steps=PATIENCE + 1, routing_learning_rate=0.0)
    trainer.train()
    assert health_of(trainer).warnings == []


def test_frozen_routing_is_warned_of(graft, rows, tmp_path):
    model = graft("delta", depth_anchored=True)
    for parameter in routing_parameters(model).values():
        parameter.requires_grad_(False)
    trainer = trainer_of(model, tmp_path, rows, max_steps=1)
    trainer.train()
    [warning] = health_of(trainer).warnings
    assert warning.startswith("dead routers: no routing parameter requires a gradient")


def test_collapsed_routing_is_warned_of(graft, rows, tmp_path):
    def warnings(scale: float, reads: int) -> list[str]:
        model = graft("attnres-states", depth_anchored=False, depth_block_size=None)
        randomize_routing(model)
        with torch.no_grad():
            for name in [n for n in model.routing_parameters() if n.endswith("query")][:reads]:
                model.get_parameter(name).mul_(scale)
        trainer = trainer_of(model, tmp_path, rows, max_steps=2, learning_rate=1e-5)
        trainer.train()
        return [text for text in health_of(trainer).warnings if "collapsed" in text]

    assert warnings(1, 16) == []
    [warning] = warnings(1e3, 16)
    assert warning.startswith("collapsed routing: in 16 of 16 reads one source takes all for most tokens, most often ")
    assert "depth_source='output'" in warning and "lower routing_learning_rate" in warning
    assert warnings(1e3, 8) == []  # not most reads


class Breaks(TrainerCallback):
    """Sets the head on fire for one step."""

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == 12:
            self.head = model.lm_head.weight.detach().clone()
            model.lm_head.weight.data.mul_(-3)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 13:
            model.lm_head.weight.data.copy_(self.head)


@pytest.mark.parametrize("breaks", [False, True])
def test_a_loss_spike_is_warned_of(breaks, graft, rows, tmp_path):
    model = graft("delta", depth_anchored=True)
    trainer = trainer_of(model, tmp_path, rows, health=100, max_steps=16, logging_steps=1, learning_rate=1e-4)
    if breaks:
        trainer.add_callback(Breaks())
    trainer.train()
    warnings = health_of(trainer).warnings
    assert len(warnings) == breaks
    if breaks:
        assert warnings[0].startswith("loss spike: ") and "at step 13" in warnings[0]
        assert "lower routing_learning_rate (now " in warnings[0]


def test_spikes_are_told_from_noise_and_from_a_falling_loss():
    generator = torch.Generator().manual_seed(0)
    noise = 3 + 0.1 * torch.randn(2000, generator=generator, dtype=torch.float64)
    detector = SpikeDetector()
    assert not any(detector.exceeded(value) for value in noise.tolist())
    assert detector.exceeded(4.5) == pytest.approx(3, abs=0.1)
    assert detector.exceeded(float("nan")) == pytest.approx(3, abs=0.1)
    assert detector.exceeded(3.1) is None
    falling = SpikeDetector()
    assert not any(falling.exceeded(10 * 0.99**step) for step in range(500))
    still = SpikeDetector()  # whose deviation says nothing: a tenth of the median has to be exceeded too
    assert not any(still.exceeded(2.0) for _ in range(10))
    assert still.exceeded(2.19) is None and still.exceeded(2.21) == 2.0
    early = SpikeDetector()
    assert not any(early.exceeded(value) for value in (3, 30, 3, 30, 3, 3, 3, 3))  # too few to judge by


def test_the_option_is_checked_and_reaches_the_trainer(tmp_path):
    with pytest.raises(ValueError, match="routing_health_steps: got 0, allowed: at least 1"):
        DepthRouteTrainingArguments(output_dir=str(tmp_path), routing_health_steps=0)
    with pytest.raises(Refused, match="routing_health_steps: got 0"):
        RoutingHealthCallback(None, 0)
    _, training = parse_arguments(["--output_dir", str(tmp_path), "--routing-health-steps", "7", "--use_cpu"])
    assert training.routing_health_steps == 7


def test_the_command_measures_where_it_is_asked_to(model_folder, text, tmp_path):
    (tmp_path / "train.txt").write_text(text)
    options = {
        "model": model_folder("delta-block"),
        "train_files": tmp_path / "train.txt",
        "block_size": 32,
        "output_dir": tmp_path / "out",
        "cache_dir": tmp_path / "cache",
        "max_steps": 4,
        "save_strategy": "no",
        "report_to": "none",
    }
    arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    log = train([*arguments, "--use_cpu", "--disable_tqdm", "true", "--routing_health_steps", "2"])["log"]
    assert [entry["step"] for entry in log if "routing_max_weight/mean" in entry] == [2, 4]
