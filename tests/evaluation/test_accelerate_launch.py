# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""`accelerate launch -m depthroute eval`: two processes, each with its part of the documents, one result."""

import json
import os
import subprocess
import sys

import pytest
from conftest import randomize_routing
from text_model_helpers import save_folder

from depthroute.evaluation import evaluate


TASKS = ["depthroute_choice", "depthroute_perplexity"]


def test_two_processes_give_the_results_of_one(stock, graft, tmp_path):
    save_folder(stock, tmp_path / "base")
    model = graft("delta-block", depth_anchored=True)
    randomize_routing(model)
    save_folder(model, tmp_path / "model")
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--multi_gpu",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
    ]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    command = [
        *launch,
        "-m",
        "depthroute",
        "eval",
        "model",
        "--compare",
        "base",
        "--tasks",
        ",".join(TASKS),
        "--limit",
        "5",
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_DATASETS_CACHE": str(tmp_path / "cache"),
        "ACCELERATE_USE_CPU": "true",  # several processes without MPI: the launcher for GPUs, told to use none
    }
    done = subprocess.run(
        [*command, "--batch-size", "2", "--device", "cpu", "--json", "scores.json"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (tmp_path / "scores.json").is_file(), done.stdout[-1500:] + done.stderr[-3000:]
    assert done.stdout.count("paired over documents") == 1  # printed by one process
    found = json.loads((tmp_path / "scores.json").read_text())
    # the first process has three of five documents with four choices each
    assert "12/12" in done.stderr and "20/20" not in done.stderr
    assert all(row["count"] == 5 for row in found["tasks"])
    for name, folder in (("a", "base"), ("b", "model")):
        expected = evaluate(tmp_path / folder, TASKS, 2, 5, device="cpu")["results"]
        for task in TASKS:
            for metric, value in expected[task].items():
                if isinstance(value, float):
                    # batches have other neighbours, so float32 sums another order
                    assert found["results"][name]["results"][task][metric] == pytest.approx(value, rel=1e-5), (
                        task,
                        metric,
                    )
