# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The files that travel with a checkpoint: flat siblings that import torch, transformers and each other only."""
