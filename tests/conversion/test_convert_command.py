# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""`depthroute convert` and `verify` as commands: what they print, and their exit codes in a process of their own."""

import subprocess
import sys

from depthroute import DepthRouteConfig


def test_what_convert_prints(originals, tmp_path, run_cli):
    code, out, err = run_cli(
        "convert", originals["qwen3"], tmp_path / "out", "--block-size", "4", "--heads", "2",
        "--set", "depth_logit_scale=1e-1", "--set", "depth_key_norm=none", "--dtype", "bfloat16",
    )  # fmt: skip
    assert code == 0, err
    for phrase in (
        "parameters copied",
        "68,320 in 91 tensors",
        "parameters added",
        "256 in 8 tensors",
        "max |Δlogits|",
        "bitwise equal",
        "negative control, one routing query perturbed",
        "model.layers.0.attn_read, model.layers.0.mlp_read",
        "bfloat16",
    ):
        assert phrase in out
    config = DepthRouteConfig.from_pretrained(tmp_path / "out")
    assert (config.depth_logit_scale, config.depth_num_heads, config.depth_key_norm) == (0.1, 2, "none")


def test_plain_convert_prints_its_gap_and_succeeds(originals, tmp_path, run_cli):
    code, out, err = run_cli("convert", originals["llama"], tmp_path / "out", "--plain")
    assert code == 0, err
    assert "not equal to the source at step 0" in out and (tmp_path / "out" / "config.json").is_file()


def test_standard_has_no_queries_and_says_so(originals, tmp_path, run_cli):
    code, out, _ = run_cli("convert", originals["qwen3"], tmp_path / "out", "--preset", "standard")
    assert code == 0 and "negative control, one weight (no routing here) perturbed" in out
    assert "0 in 0 tensors" in out


def test_a_process_of_its_own(originals, tmp_path):
    code = (
        "import sys, depthroute; assert 'depthroute_conversion' not in sys.modules; "
        "from depthroute.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "convert", originals["qwen3"], tmp_path / "out", "--preset", "nonesuch"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("depthroute: refused: preset: got 'nonesuch', nearest: ")
