# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Plain `lm_eval --model hf` on a saved folder, in a process that cannot import the package."""

import json
import os
import subprocess
import sys

import pytest
from conftest import randomize_routing
from text_model_helpers import character_tokenizer, save_folder

from depthroute.evaluation import TASK_FOLDER, evaluate


WITHOUT_THE_PACKAGE = """
import runpy, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("depthroute", "depthroute_kernels", "depthroute_conversion"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
output, folders = sys.argv[1], sys.argv[2:sys.argv.index("--")]
options = sys.argv[sys.argv.index("--") + 1:]
for folder in folders:
    model = ["--model_args", f"pretrained={folder},trust_remote_code=True", "--output_path", f"{output}/{folder[-3:]}"]
    sys.argv = ["lm_eval", *model, *options]
    runpy.run_module("lm_eval", run_name="__main__", alter_sys=True)
"""

PRESETS = {"0.1": ("attnres-block", {}), "0.2": ("dar", {"dual_gates": "dynamic"})}


def test_lm_eval_runs_the_code_in_the_folder(stock, graft, tmp_path):
    models = {version: graft(preset, depth_anchored=True, **values) for version, (preset, values) in PRESETS.items()}
    folders = []
    for version, model in models.items():
        randomize_routing(model, scale=1.0)
        folders.append(str(save_folder(model, tmp_path / f"routed-{version}")))
    task = "depthroute_perplexity"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {
        "HF_MODULES_CACHE": str(tmp_path / "modules"),
        "HF_DATASETS_CACHE": str(tmp_path / "datasets"),
        "OMP_NUM_THREADS": "1",
    }
    options = ["--model", "hf", "--tasks", task, "--include_path", str(TASK_FOLDER)]
    options += ["--device", "cpu", "--batch_size", "2", "--limit", "3"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_THE_PACKAGE, str(tmp_path / "results"), *folders, "--", *options],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert list((tmp_path / "modules").rglob("modeling_depthroute.py")), "the folder's own code did not run"

    base = evaluate(stock, task, 2, 3, tokenizer=character_tokenizer(), bootstrap_iters=0)["results"][task]
    for version, model in models.items():
        (file,) = (tmp_path / "results" / version).rglob("results_*.json")
        scores = json.loads(file.read_text())["results"][task]
        here = evaluate(model, task, 2, 3, tokenizer=character_tokenizer(), bootstrap_iters=0)["results"][task]
        # in a process of its own, where the folder's own code computes reads by the reference and not in two phases: float32
        # in another order, through some layers
        assert scores["bits_per_byte,none"] == pytest.approx(here["bits_per_byte,none"], rel=1e-5)
        assert abs(scores["bits_per_byte,none"] - base["bits_per_byte,none"]) > 0.01
