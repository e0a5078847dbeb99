# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Whole models whose reads are computed in two phases, against the same models with the reference: together in the model's
loop, by each layer under checkpointing and where its parameters are elsewhere, and while decoding."""

import logging
import subprocess
import sys
from collections import Counter
from functools import partial

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from combination_cases import COMBINATIONS
from conftest import PRESETS, QUERY_PRESETS, float64_loss, randomize_routing, tiny_config, tiny_qwen3_config
from peft import LoraConfig, get_peft_model
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

from depthroute import DepthRouteForCausalLM
from depthroute.modeling import depth_ops, residual_depth_attention, residual_dual_stream
from depthroute.modeling.compat import CACHE_NAME
from depthroute.modeling.modeling_depthroute import DepthRouteModel
from depthroute.training import routing_module_names
from depthroute_kernels import dispatch
from depthroute_kernels.dispatch import BACKENDS


LAYERS = 5
# what no preset has by itself, each where it has a meaning
OPTIONS = {
    "attnres, four heads, scaled": ("attnres", {"depth_num_heads": 4, "depth_logit_scale": 0.5}),
    "attnres, null": ("attnres", {"depth_null_source": True}),
    "attnres-block of one layer": ("attnres-block", {"depth_block_size": 1}),
    "attnres-block of three layers": ("attnres-block", {"depth_block_size": 3, "depth_value_projection": True}),
    "attnres-states in blocks": ("attnres-states", {"depth_block_size": 2}),
    "delta-block of one layer": ("delta-block", {"depth_block_size": 1, "depth_null_source": True}),
    "delta-block of details": ("delta-block", {"depth_detail_bases": ["phase"]}),
    "delta, no norm": ("delta", {"depth_key_norm": "none", "depth_value_projection": True}),
    "rd-attnres, uniform": ("rd-attnres", {"depth_value_route": "uniform"}),
    "rd-attnres, average": ("rd-attnres", {"depth_value_route": "average", "depth_num_heads": 4}),
    "wav, null": ("wav", {"depth_null_source": True, "depth_num_heads": 4}),
    "dar, self": ("dar", {"dual_routing": "self", "depth_num_heads": 4}),
    "dar, cross value": ("dar", {"dual_routing": "cross_value", "dual_gates": "dynamic"}),
    "dar, fixed": ("dar", {"dual_routing": "fixed", "dual_partial_source": False}),
}
CASES = {**{preset: (preset, {}) for preset in PRESETS}, **OPTIONS, **COMBINATIONS}
ANCHORED = pytest.mark.parametrize(
    ("case", "anchored"),
    [(case, anchored) for case in CASES for anchored in (False, True) if not (case == "standard" and anchored)],
    ids=lambda value: value if isinstance(value, str) else "anchored" if value else "plain",
)
SOME = ["attnres", "attnres-block", "delta-block", "rd-attnres", "wav", "dar"]
FEW = pytest.mark.parametrize("case", SOME)


def build(case, backend, **values):
    """The case's model in float64, with the same random parameters every time."""
    preset, fields = CASES[case]
    base = tiny_qwen3_config(num_hidden_layers=LAYERS)
    torch.manual_seed(0)
    model = DepthRouteForCausalLM(tiny_config(preset, base=base, **{**fields, **values}, depth_backend=backend))
    model.double().train()
    randomize_routing(model, scale=0.3)
    return model


@pytest.fixture(autouse=True)
def exact(float64_norms):
    """All of the model in float64."""


@pytest.fixture
def ids(token_ids):
    return token_ids[:, :7]


def outcome(model, ids):
    """Logits, routing, and every gradient by name."""
    model.zero_grad()
    output = model(ids, use_cache=False, output_routing=True)
    torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return output.logits.detach(), output.routing, gradients


def assert_close(found, expected, what):
    """float64: the same sums in another order, through ten sublayers and back."""
    assert found.shape == expected.shape and found.dtype == expected.dtype
    torch.testing.assert_close(
        found, expected, rtol=0, atol=1e-10 * expected.abs().max().item(), msg=lambda text: f"{what}: {text}"
    )


def assert_same_outcome(found, expected):
    assert_close(found[0], expected[0], "logits")
    assert found[1].keys() == expected[1].keys()
    for name, read in expected[1].items():
        assert found[1][name].sources == read.sources
        assert (found[1][name].value_weights is None) == (read.value_weights is None)
        for one, other in zip(found[1][name][1:], read[1:]):
            if other is not None:
                assert not one.requires_grad
                assert_close(one, other, name)
    assert found[2].keys() == expected[2].keys()
    for name, gradient in expected[2].items():
        assert_close(found[2][name], gradient, f"gradient of {name}")


@pytest.fixture
def spy(monkeypatch):
    """Counts phases, merges and reads without gradients of the CPU implementation, reads of the reference, and groups of layers."""
    calls = Counter()

    def watch(owner, name, key, detail=lambda result: None):
        original = getattr(owner, name)

        def counted(*args, **kwargs):
            result = original(*args, **kwargs)
            calls[key] += 1
            if detail(result):
                calls[f"{key} done"] += 1
            return result

        monkeypatch.setattr(owner, name, counted)

    watch(BACKENDS["cpu"], "phase", "phase")
    watch(BACKENDS["cpu"], "merge", "merge")
    watch(BACKENDS["cpu"].InferenceReads, "read", "inference")
    watch(depth_ops, "depth_mix", "reference")
    watch(residual_depth_attention, "depth_read", "reference")
    watch(residual_dual_stream, "depth_mix", "reference")
    watch(DepthRouteModel, "_prepare_group", "group", detail=bool)
    return calls


def by_layers(model):
    """Let every layer prepare its own reads."""
    model.model._prepare_group = lambda *arguments: None


def checkpointed(model, reentrant):
    model._set_gradient_checkpointing(True, partial(checkpoint, use_reentrant=reentrant))


@pytest.fixture(scope="module")
def references():
    """Outcomes of the reference, computed once each."""
    known = {}

    def of(case, anchored, ids):
        if (case, anchored) not in known:
            known[case, anchored] = outcome(build(case, "reference", **anchoring(case, anchored)), ids)
        return known[case, anchored]

    return of


def anchoring(case, anchored):
    return {} if case == "standard" else {"depth_anchored": anchored}


# --- every model


@ANCHORED
def test_reads_of_several_layers_together(case, anchored, references, ids, spy):
    model = build(case, "cpu", **anchoring(case, anchored))
    expected = references(case, anchored, ids)
    spy.clear()
    assert_same_outcome(outcome(model, ids), expected)
    if CASES[case][0] in QUERY_PRESETS:
        assert spy["phase"] > 0 and spy["group done"] > 0 and spy["reference"] == 0
        # a phase for each group of layers, and one for the final read, which comes by itself
        assert spy["phase"] == spy["group done"] + (model.model.final_read is not None)


@FEW
@pytest.mark.parametrize("anchored", [False, True], ids=["plain", "anchored"])
def test_reads_of_each_layer(case, anchored, references, ids, spy):
    model = build(case, "cpu", **anchoring(case, anchored))
    by_layers(model)
    expected = references(case, anchored, ids)
    spy.clear()
    assert_same_outcome(outcome(model, ids), expected)
    assert spy["phase"] >= LAYERS - 2 and spy["group"] == spy["reference"] == 0


@pytest.mark.parametrize(
    ("case", "anchored", "reentrant"),
    [(case, case != "standard", index % 2 == 0) for index, case in enumerate(CASES)]
    + [(case, False, reentrant) for case in SOME for reentrant in (False, True)],
    ids=lambda value: value if isinstance(value, str) else "yes" if value else "no",
)
def test_reads_under_checkpointing(case, anchored, reentrant, references, ids, spy):
    """Here each layer prepares its own reads, and does so again in the backward pass."""
    model = build(case, "cpu", **anchoring(case, anchored))
    checkpointed(model, reentrant)
    expected = references(case, anchored, ids)
    spy.clear()
    assert_same_outcome(outcome(model, ids), expected)
    if CASES[case][0] in QUERY_PRESETS:
        assert spy["phase"] > 0 and spy["group done"] == spy["reference"] == 0


@FEW
def test_the_reference_runs_where_it_is_asked_for(case, ids, spy):
    outcome(build(case, "reference"), ids)
    assert spy["reference"] > 0 and spy["phase"] == spy["merge"] == spy["group done"] == 0


@FEW
def test_auto_is_the_cpu_path_here(case, ids, spy):
    outcome(build(case, "auto"), ids)
    assert spy["phase"] > 0 and spy["reference"] == 0


@FEW
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_anchored_start_is_the_stream_bit_for_bit(case, dtype, ids, spy):
    """By groups, by layers, and without gradients: all of them at q = 0."""
    preset, fields = CASES[case]
    base = tiny_qwen3_config(num_hidden_layers=LAYERS)
    torch.manual_seed(0)
    stock = DepthRouteForCausalLM(tiny_config("standard", base=base)).to(dtype)
    model = DepthRouteForCausalLM(tiny_config(preset, base=base, depth_anchored=True, depth_backend="cpu", **fields))
    model.load_state_dict(stock.state_dict(), strict=False)
    model.to(dtype)
    expected = stock(ids).logits
    assert torch.equal(model(ids).logits, expected)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected)
    by_layers(model)
    assert torch.equal(model(ids).logits, expected)
    assert spy["phase"] > 0 and spy["reference"] == 0


# --- no stale state


@FEW
def test_two_forwards_retained_graphs_and_some_gradients_first(case, ids):
    model = build(case, "cpu", depth_anchored=True)
    parameters = dict(model.named_parameters())
    other_ids = ids.flip(1)
    expected = [outcome(build(case, "reference", depth_anchored=True), one)[2] for one in (ids, other_ids)]
    losses = [float64_loss(model, one) for one in (ids, other_ids)]
    embedding = parameters["model.embed_tokens.weight"]
    part = [name for name in parameters if "layers.2" in name]
    found = torch.autograd.grad(losses[1], [parameters[name] for name in part], retain_graph=True)
    for name, gradient in zip(part, found):
        assert_close(gradient, expected[1][name], name)
    (first,) = torch.autograd.grad(losses[0], embedding, retain_graph=True)
    (second,) = torch.autograd.grad(losses[1], embedding, retain_graph=True)
    assert_close(first, expected[0]["model.embed_tokens.weight"], "embedding")
    assert_close(second, expected[1]["model.embed_tokens.weight"], "embedding")
    for loss, gradients in zip(losses, expected):
        model.zero_grad()
        loss.backward()
        for name, gradient in gradients.items():
            assert_close(parameters[name].grad, gradient, name)


@FEW
def test_an_exception_in_the_middle_and_then_a_good_run(case, ids):
    model = build(case, "cpu")
    expected = outcome(model, ids)

    def fail(*_):
        raise ArithmeticError("on purpose")

    for module in (model.model.layers[2].mlp, model.model.layers[3].self_attn):
        hook = module.register_forward_hook(fail)
        with pytest.raises(ArithmeticError, match="on purpose"):
            outcome(model, ids)
        hook.remove()
        hook = module.register_full_backward_hook(fail)
        with pytest.raises(ArithmeticError, match="on purpose"):
            outcome(model, ids)
        hook.remove()
        for found, before in zip(outcome(model, ids)[2].values(), expected[2].values(), strict=True):
            assert torch.equal(found, before)


@FEW
def test_inference_and_then_training(case, ids):
    model = build(case, "cpu")
    expected = outcome(model, ids)
    with torch.inference_mode():
        inference = model(ids).logits
    assert_close(inference.clone(), expected[0], "logits")
    for found, before in zip(outcome(model, ids)[2].values(), expected[2].values(), strict=True):
        assert torch.equal(found, before)


@FEW
@pytest.mark.parametrize("together", [True, False], ids=["together", "by layers"])
def test_a_second_derivative_is_refused_by_name(case, together, ids):
    model = build(case, "cpu")
    model.set_attn_implementation("eager")  # fused attention has no second derivative either
    if not together:
        by_layers(model)
    parameters = [model.model.embed_tokens.weight, model.model.layers[-1].mlp_read.query]
    first = torch.autograd.grad(float64_loss(model, ids), parameters, create_graph=True)
    with pytest.raises(RuntimeError, match='set depth_backend="reference"'):
        torch.autograd.grad(sum(gradient.square().sum() for gradient in first), parameters)


@FEW
def test_autocast_gives_float32_gradients(case, token_ids):
    model = build(case, "cpu").float()
    with torch.autocast("cpu", torch.bfloat16):
        output = model(token_ids, labels=token_ids, output_routing=True)
    output.loss.backward()
    assert all(read.weights.dtype == torch.float32 for read in output.routing.values())
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype == torch.float32 and parameter.grad.isfinite().all(), name


# --- decoding


@pytest.mark.parametrize("case", CASES)
def test_cached_tokens_equal_the_whole_forward(case, ids, spy):
    model = build(case, "cpu").eval()
    whole = model(ids, use_cache=False).logits
    spy.clear()
    with torch.no_grad():
        cache = {CACHE_NAME: DynamicCache(config=model.config)}
        parts = [ids[:, :3], *ids[:, 3:].split(1, dim=1)]
        logits = [model(part, use_cache=True, **cache).logits for part in parts]
    assert_close(torch.cat(logits, 1), whole.detach(), "logits")
    if CASES[case][0] in QUERY_PRESETS:
        assert spy["inference"] > 0 and spy["reference"] == 0


@FEW
def test_generation(case, ids):
    model, reference = build(case, "cpu").eval(), build(case, "reference").eval()
    greedy = {"do_sample": False, "max_new_tokens": 5, "pad_token_id": 0, "eos_token_id": None}
    found = model.generate(ids, **greedy)
    assert found.shape == (2, 12)
    assert torch.equal(found, model.generate(ids, use_cache=False, **greedy))
    assert torch.equal(found, reference.generate(ids, **greedy))


# --- parameters that are elsewhere


@FEW
@pytest.mark.parametrize("where", ["cpu offload", "disk offload"])
def test_offloaded_parameters(where, case, ids, spy, tmp_path):
    """Accelerate keeps them on the meta device between the calls of their modules."""
    with torch.no_grad():
        expected = build(case, "reference").eval()(ids).logits
        model = build(case, "cpu").eval()
        if where == "cpu offload":
            cpu_offload(model, execution_device=torch.device("cpu"))
        else:
            disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
        assert model.model.layers[2].mlp_read.query.device.type == "meta"
        spy.clear()
        assert_close(model(ids).logits, expected, "logits")
        assert model.model.layers[2].mlp_read.query.device.type == "meta"
    assert spy["inference"] > 0 and spy["group done"] == spy["reference"] == 0


@FEW
def test_offloaded_layers_with_gradients(case, token_ids, spy):
    """With gradients, where layers prepare a phase each."""
    ids = token_ids.repeat(8, 4)
    expected = build(case, "reference").eval()(ids).logits
    model = build(case, "cpu").eval()
    cpu_offload(model, execution_device=torch.device("cpu"))
    spy.clear()
    assert_close(model(ids).logits, expected, "logits")
    assert spy["phase"] >= LAYERS - 2 and spy["group done"] == spy["reference"] == 0


def test_a_device_map_of_one_device_keeps_groups(ids, spy):
    model = build("attnres-block", "cpu")
    expected = outcome(model, ids)[0]
    model = dispatch_model(model, {"": "cpu"}, force_hooks=True)
    spy.clear()
    assert torch.equal(model(ids).logits, expected)
    assert spy["group done"] > 0 and spy["reference"] == 0


@pytest.mark.parametrize("case", ["attnres", "delta-block", "rd-attnres", "wav", "dar"])
@pytest.mark.parametrize("reentrant", [None, False], ids=["together", "checkpointing"])
def test_reads_that_peft_has_wrapped(reentrant, case, ids, spy):
    """The copies that are trained are those that run, and they get the reference's gradients."""
    gradients = {}
    for backend in ("reference", "cpu"):
        model = build(case, backend)
        config = LoraConfig(
            r=2, target_modules=["q_proj"], modules_to_save=routing_module_names(model), task_type="CAUSAL_LM"
        )
        torch.manual_seed(0)
        model = get_peft_model(model, config).double().train()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "modules_to_save" in name:
                    parameter.add_(0.1)
                elif "original_module" in name:
                    parameter.fill_(float("nan"))  # never to be read
        if reentrant is not None:
            checkpointed(model.get_base_model(), reentrant)
        spy.clear()
        float64_loss(model, ids).backward()
        assert (spy["reference"] == 0) == (backend == "cpu")
        assert spy["group done"] == 0 or (reentrant is None and backend == "cpu")
        gradients[backend] = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert gradients["cpu"].keys() == gradients["reference"].keys()
    assert any("modules_to_save.default.query" in name for name in gradients["cpu"])
    for name, gradient in gradients["reference"].items():
        assert_close(gradients["cpu"][name], gradient, name)


SHARDED = """
import os, sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3Config
from depthroute import DepthRouteConfig, DepthRouteForCausalLM
from depthroute_kernels.dispatch import BACKENDS

torch.set_num_threads(1)
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
base = Qwen3Config(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
                   num_key_value_heads=2, head_dim=8, initializer_range=0.2)
ids = torch.randint(61, (2, 2, 9), generator=torch.Generator().manual_seed(1))
phases = []
phase = BACKENDS["cpu"].phase
BACKENDS["cpu"].phase = lambda *args, **kwargs: phases.append(1) or phase(*args, **kwargs)

def build(preset, backend):
    torch.manual_seed(0)
    config = DepthRouteConfig.from_preset(preset, base=base, depth_anchored=True, depth_backend=backend)
    model = DepthRouteForCausalLM(config)
    with torch.no_grad():
        for parameter in model.routing_parameters().values():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model

for preset in sys.argv[3:]:
    whole = build(preset, "reference")
    sum(whole(one, labels=one, use_cache=False).loss / 2 for one in ids).backward()
    model = build(preset, "cpu")
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    groups = []
    prepare = model.model._prepare_group
    def watched(*args):
        groups.append(prepare(*args))
        return groups[-1]
    model.model._prepare_group = watched
    phases.clear()
    model(ids[rank], labels=ids[rank], use_cache=False).loss.backward()
    assert groups and not any(groups) and phases, (len(groups), len(phases))
    for (name, expected), parameter in zip(whole.named_parameters(), model.parameters()):
        found = parameter.grad.full_tensor()
        gap = (found - expected.grad).abs().max() / expected.grad.abs().max().clamp(min=1e-3)
        assert gap < 1e-3, (preset, name, gap)  # float32 through eight sublayers
print("sharded: ok", flush=True)
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # past the interpreter's teardown, in which gloo's own threads now and then abort a process that is done
"""


def test_sharded_parameters(tmp_path):
    """FSDP2 on two processes: a read's parameters are whole only while its layer runs."""
    presets = ["attnres-block", "delta", "rd-attnres", "dar"]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SHARDED, str(rank), str(tmp_path), *presets],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)[-3000:]
    assert all("sharded: ok" in output for output in outputs)


# --- the choice


def test_triton_where_it_cannot_run_is_refused_in_one_line(ids, spy, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    forget_choices()
    model = build("delta-block", "triton")
    with pytest.raises(ValueError) as caught:
        model(ids)
    text = str(caught.value)
    assert text.startswith("depth_backend: got 'triton', allowed: ") and "\n" not in text
    assert "reference" in text and "triton" in text.lower().split("allowed:")[1]
    assert spy["phase"] == spy["reference"] == 0  # nothing took its place
    forget_choices()


def forget_choices():
    dispatch._choose_once.cache_clear()


def test_the_choice_is_logged_once(ids, caplog):
    forget_choices()
    model = build("delta-block", "auto")
    with caplog.at_level(logging.INFO, logger="depthroute_kernels"):
        for _ in range(2):
            outcome(model, ids)
    records = [record for record in caplog.records if record.name.startswith("depthroute_kernels")]
    assert [(record.levelno, record.getMessage()) for record in records] == [
        (logging.INFO, "depth reads on cpu in torch.float64: cpu")
    ]


WITHOUT_KERNELS = """
import sys, torch
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "depthroute_kernels":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
from depthroute import DepthRouteForCausalLM

torch.set_num_threads(1)
expected = torch.load(sys.argv[1] + "/expected.pt")
model = DepthRouteForCausalLM.from_pretrained(sys.argv[1]).eval()
assert model.config.depth_backend == "auto"
assert torch.equal(model(expected["ids"]).logits, expected["logits"])
model.config.depth_backend = "reference"
assert torch.equal(model(expected["ids"]).logits, expected["logits"])
for name in ("cpu", "triton"):
    model.config.depth_backend = name
    try:
        model(expected["ids"])
    except ValueError as error:
        print(error)
assert not any(name.startswith("depthroute_kernels") for name in sys.modules)
"""


def test_without_the_kernels_auto_is_the_reference(token_ids, tmp_path):
    model = build("delta-block", "reference").float().eval()
    logits = model(token_ids).logits.detach()
    model.config.depth_backend = "auto"
    model.save_pretrained(tmp_path)
    torch.save({"ids": token_ids, "logits": logits}, tmp_path / "expected.pt")
    command = [sys.executable, "-c", WITHOUT_KERNELS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == [
        f"depth_backend: got {name!r}, allowed: 'auto' or 'reference' where depthroute_kernels is not installed"
        for name in ("cpu", "triton")
    ]
